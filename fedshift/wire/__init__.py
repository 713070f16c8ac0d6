"""Frames: layout, registry of codecs, writer, reader and running mean."""
