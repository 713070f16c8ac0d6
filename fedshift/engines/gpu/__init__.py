"""The batched engine: clients of a round, and of many runs, stacked on a leading axis; on a GPU or a CPU."""
