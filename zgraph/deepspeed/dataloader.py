"""A data loader that gives each data-parallel rank its own micro-batches, and one that starts over at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from zgraph.errors import ModelError


@dataclass(frozen=True)
class Share:
    """The part of the data that this rank reads."""

    rank: int  # this rank's index among the ranks that read different rows
    ranks: int  # the number of ranks that read different rows


@dataclass(frozen=True)
class Reading:
    """How rows are read."""

    drop_last: bool = False  # leave out the rows at the end that make no whole micro-batch
    pin_memory: bool = True  # put micro-batches into page-locked memory, where there is a GPU
    workers: int = 0  # processes that read rows; 0: this one reads them


class DeepSpeedDataLoader:
    """Micro-batches of `batch_size` rows of this rank's `share` of a data set.

    Rows are drawn as DeepSpeed's loader draws them: by torch's `DistributedSampler`, shuffled by seed 0, in the same order in each epoch
    (`data_sampler.set_epoch` changes it). An iterable data set shards itself. Raises `ModelError` for an object that is not a data set.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        share: Share,
        *,
        sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        reading: Reading = Reading(),
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        iterable = isinstance(dataset, IterableDataset)
        if not iterable and not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise ModelError(
                f"training_data is no data set but {type(dataset).__name__}",
                hint="a torch.utils.data.Dataset, or a list of examples; a loader of your own needs no engine",
            )
        if sampler is None and not iterable:
            sampler = DistributedSampler(dataset, num_replicas=share.ranks, rank=share.rank)
        self.data_sampler = sampler
        self.post_process_func: Callable[..., Any] | None = None
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=collate_fn,
            drop_last=reading.drop_last,
            pin_memory=reading.pin_memory and torch.cuda.is_available(),
            num_workers=reading.workers,
        )
        self._iterator: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> DeepSpeedDataLoader:
        self._iterator = iter(self._loader)
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        batch = next(self._iterator)
        return batch if self.post_process_func is None else self.post_process_func(batch, {})


class RepeatingLoader:
    """An endless iterator over a loader's micro-batches, which starts over at the loader's end."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
