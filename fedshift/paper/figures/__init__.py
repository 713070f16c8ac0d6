"""The paper's ten figures; the numbers of a figure and its drawing are separate functions."""
