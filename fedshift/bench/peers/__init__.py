"""Measurements of `fedshift bench peers`: the same task in fedshift, by hand, in pfl-research and in Flower."""
