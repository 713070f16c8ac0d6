"""One round of federated learning, its uplinks and its server; `engine` is the contract of what trains clients."""
