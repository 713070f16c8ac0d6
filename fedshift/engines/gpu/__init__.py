"""The batched engine: the clients of a round, of one or many runs, stacked on a leading axis; on a GPU or a CPU."""
