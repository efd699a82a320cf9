"""How attention heads lie on devices that share a model: KV heads are replicated where that saves query heads.

Letters: K KV heads, G query heads per KV head, t devices. K // t KV heads lie on each device whole, with all of their
queries. The r = K mod t others are shared: t // r devices hold a copy of such a head each, and a part of its queries.
Where less than two devices are there for each of the others, they lie whole on some devices, beside zero padding.
Every device holds ceil(K / t) KV heads in any case, so the copies take no memory that padding would not take.

For 8 KV heads of 8 queries on 6 devices: one whole head and a third of another (3 queries) on each device, 11 queries
instead of 16 with padding (and 10.7 if queries could be split evenly).
"""

import dataclasses
import functools

import numpy as np

NOTHING = -1

# Logical axes beside "kv_heads" that say what the rows of a KV head are.
QUERY_ROWS = "query_rows"  # queries, each of one or several entries
KV_ROWS = "kv_rows"  # a key or a value
QKV_ROWS = "qkv_rows"  # queries, then a key and a value


@dataclasses.dataclass(frozen=True)
class HeadLayout:
    """The heads of a device, the same number on each.

    Attributes:
      kv_heads: K.
      group: G.
      degree: t.
      whole: KV heads with all of their queries.
      part: queries of one more KV head, which other devices hold too; 0 where there is none.
      copies: devices that hold such a head.
    """

    kv_heads: int
    group: int
    degree: int
    whole: int
    part: int
    copies: int

    @property
    def slots(self) -> tuple[int, ...]:
        """KV heads of a device by kind: whole ones, then shared ones. Each kind has an array of the cache."""
        return tuple(n for n in (self.whole, int(self.part > 0)) if n)

    @property
    def queries(self) -> int:
        """Query heads of a device, padding included."""
        return self.whole * self.group + self.part

    @property
    def splits(self) -> bool:
        """Whether the queries of some KV heads are split; else heads are padded with zeros at the end."""
        return self.part > 0

    def kv_of_slots(self) -> np.ndarray:
        """The KV head in each slot of each device, `NOTHING` for padding, int [t, slots]."""
        device = np.arange(self.degree)
        whole = device[:, None] * self.whole + np.arange(self.whole)
        shared = self.degree * self.whole + device // self.copies
        shared = np.where((shared < self.kv_heads) & (self._first_query() < self.group), shared, NOTHING)
        return np.concatenate([whole, shared[:, None]], axis=1)

    def queries_of_slots(self) -> np.ndarray:
        """Each query of each device as KV head * G + place, `NOTHING` for padding, int [t, queries]."""
        kv = self.kv_of_slots()
        whole = (kv[:, :-1, None] * self.group + np.arange(self.group)).reshape(self.degree, -1)
        place = self._first_query()[:, None] + np.arange(self.part)
        shared = np.where((kv[:, -1:] >= 0) & (place < self.group), kv[:, -1:] * self.group + place, NOTHING)
        return np.concatenate([whole, shared], axis=1)

    def _first_query(self) -> np.ndarray:
        return np.arange(self.degree) % self.copies * self.part


@functools.cache
def head_layout(kv_heads: int, group: int, degree: int) -> HeadLayout:
    """The layout of K KV heads with G queries each on t devices."""
    whole, rest = divmod(kv_heads, degree)
    copies = degree // rest if rest else 1
    if copies < 2:
        return HeadLayout(kv_heads, group, degree, -(-kv_heads // degree), 0, 1)
    return HeadLayout(kv_heads, group, degree, whole, -(-group // copies), copies)


def placed_rows(layout: HeadLayout, rows: str, entries: int) -> int:
    """Rows of a device where a KV head has `entries` of a kind; only for a layout that splits queries."""
    slots = sum(layout.slots)
    if rows == KV_ROWS:
        return slots
    return layout.queries + 2 * slots if rows == QKV_ROWS else layout.queries * (entries // layout.group)


def arrange_heads(array: np.ndarray, layout: HeadLayout, axis: int, rows: str) -> np.ndarray:
    """Put heads in the order of the devices, `[..., K, rows, ...]` -> `[..., t, rows of a device, ...]`.

    `axis` is that of the KV heads, `rows` the kind of the rows after it. Queries come first, then keys, then values;
    padding is zeros.
    """
    shape = array.shape
    flat = array.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    index = _row_index(layout, rows, shape[axis + 1])
    taken = np.take(flat, np.maximum(index, 0).reshape(-1), axis=axis)
    taken[(slice(None),) * axis + (index.reshape(-1) < 0,)] = 0
    return taken.reshape(*shape[:axis], *index.shape, *shape[axis + 2 :])


def collect_heads(array: np.ndarray, layout: HeadLayout, axis: int, rows: str, entries: int) -> np.ndarray:
    """The reverse of `arrange_heads`, for KV heads of `entries` rows."""
    index = _row_index(layout, rows, entries)
    flat = array.reshape(*array.shape[:axis], -1, *array.shape[axis + 2 :])
    # Any copy will do: they are alike.
    wanted, place = np.unique(index.reshape(-1), return_index=True)
    taken = np.take(flat, place[wanted >= 0], axis=axis)
    return taken.reshape(*array.shape[:axis], layout.kv_heads, entries, *array.shape[axis + 2 :])


def _row_index(layout: HeadLayout, rows: str, entries: int) -> np.ndarray:
    """For each row of each device, its place among the K * entries rows of all heads, or `NOTHING`; int [t, rows]."""
    slots, queries = layout.kv_of_slots(), layout.queries_of_slots()

    def known(index: np.ndarray, found: np.ndarray) -> np.ndarray:
        return np.where(index >= 0, found, NOTHING)

    if rows == KV_ROWS:
        return slots
    if rows == QUERY_ROWS:
        each = entries // layout.group
        spread = known(queries[..., None], queries[..., None] * each + np.arange(each))
        return spread.reshape(layout.degree, -1)
    kv, place = queries // layout.group, queries % layout.group
    key = known(slots, slots * entries + layout.group)
    return np.concatenate([known(queries, kv * entries + place), key, known(slots, key + 1)], axis=1)
