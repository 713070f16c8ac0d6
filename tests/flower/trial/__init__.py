"""An app for deployments with failures; `write_app` of tests.flower.deployed writes it into a folder."""
