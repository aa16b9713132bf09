"""Judge whether a checkpoint is whole, by its files, its values, its training state and its model's definition."""
