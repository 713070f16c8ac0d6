"""Who uploads how: the groups of clients, their codecs and bandwidths, from the settings."""

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from fedshift.experiment.settings import Bits, CodingSettings, Experiment, LinkSettings
from fedshift.experiment.toml import SettingsError
from fedshift.rounds.federation import Group
from fedshift.rounds.uplink import Uplink


def links(experiment: Experiment) -> tuple[list[Group], Tensor]:
    """The groups of clients that upload alike, and the group of each client (N,)."""
    said, clients = experiment.uplink, experiment.data.clients
    common = said.model_dump(include=set(CodingSettings.model_fields))

    def link(bits: Bits, name: str) -> Group:
        every = said.bandwidth.get(bits) if isinstance(said.bandwidth, dict) else said.bandwidth
        return group_of(name, LinkSettings(**common, bits=bits, bandwidth=None if isinstance(every, tuple) else every))

    if isinstance(said.bits, tuple):
        kinds = sorted(set(said.bits), reverse=True)
        return [link(bits, f"{bits} bit") for bits in kinds], torch.tensor([kinds.index(bits) for bits in said.bits])
    if isinstance(said.bits, dict):
        groups = [link(bits, f"{bits} bit") for bits in said.bits]
        return groups, _populated(groups, interleave(list(said.bits.values()), clients), "uplink.bits")
    if isinstance(said.bits, str):
        parts = [cast(Bits, int(bits)) for bits in said.bits.split("+")]
        groups = [link(bits, f"{bits} bit{f' ({i})' * (parts.count(bits) > 1)}") for i, bits in enumerate(parts, 1)]
        return groups, _populated(groups, torch.arange(clients) % len(parts), "uplink.bits")
    if not said.group:
        return [link(said.bits, f"{said.bits} bit")], torch.zeros(clients, dtype=torch.int64)
    return named_groups(experiment, link)


def named_groups(experiment: Experiment, link: Callable[[Bits, str], Group]) -> tuple[list[Group], Tensor]:
    """Groups with lists of clients first, then those with shares among the others, then everybody else."""
    said, clients = experiment.uplink, experiment.data.clients
    assert isinstance(said.bits, int)
    groups = [group_of(name, own) for name, own in said.group.items()] + [link(said.bits, "others")]
    others = len(groups) - 1
    group = torch.full((clients,), others)
    for i, (name, own) in enumerate(said.group.items()):
        for client in own.clients or ():
            if client >= clients or group[client] != others:
                why = f"there are {clients} clients" if client >= clients else "it is in another group already"
                raise SettingsError(f"uplink.group.{name}.clients: client {client}: {why}")
            group[client] = i
    shares = [own.share or 0.0 for own in said.group.values()]
    free = torch.nonzero(group == others)[:, 0]
    if any(shares) and len(free):
        mine = [share * clients / len(free) for share in shares]
        if sum(mine) > 1 + 1e-6:
            raise SettingsError("uplink.group: more clients are listed than the shares leave over")
        group[free] = interleave([*mine, max(0.0, 1 - sum(mine))], len(free))
    if not (group == others).any():
        groups.pop()
    return groups, _populated(groups, group, "uplink.group")


def bandwidth(experiment: Experiment, groups: Sequence[Group], group: Tensor) -> Tensor | None:
    """Bytes a second of each client (N,); None where nothing is said."""
    said = experiment.uplink.bandwidth
    if isinstance(said, tuple):
        return torch.tensor(said)
    if not any(one.bandwidth for one in groups):
        return None
    return torch.tensor([one.bandwidth or math.inf for one in groups])[group]


def _populated(groups: Sequence[Group], group: Tensor, where: str) -> Tensor:
    for i, one in enumerate(groups):
        if not (group == i).any():
            raise SettingsError(f"{where}: group '{one.name}' is empty: its share of {len(group)} clients is none")
    return group


def group_of(name: str, link: LinkSettings) -> Group:
    return Group(name, Uplink(link.codec(link.bits), link.send == "updates", link.feedback), link.bandwidth)


def interleave(shares: Sequence[float], n: int) -> Tensor:
    """Shares spread as evenly as can be: each next client goes to the group that is furthest behind.

    >>> interleave([0.5, 0.25, 0.25], 8).tolist()
    [0, 1, 2, 0, 0, 1, 2, 0]
    """
    counts, group = [0] * len(shares), []
    for i in range(n):
        g = max(range(len(shares)), key=lambda g: (round(shares[g] * (i + 1) - counts[g], 9), -g))
        counts[g] += 1
        group.append(g)
    return torch.tensor(group)
