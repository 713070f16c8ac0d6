"""Frames: layout, registry of codecs, writer, reader and the mean over frames; what is in a frame is not known here."""
