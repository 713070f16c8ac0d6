"""An experiment as a Flower app, and its simulation."""
