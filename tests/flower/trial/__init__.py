"""An app for deployments that go wrong; `write_app` of tests.flower.deployed puts it into a folder of its own."""
