"""The schedules of pipelines: in which order ranks run forwards and backwards of micro-batches."""
