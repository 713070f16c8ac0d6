"""The paper's ten figures: what they show is worked out in one function, drawn in another."""
