"""Documents to tokens: texts are cut into chunks, chunks become parts in processes, and parts one data set."""
