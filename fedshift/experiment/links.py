"""Groups of clients with their codecs and bandwidths, from the settings."""

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from fedshift.experiment.settings import Bits, CodingSettings, Experiment, LinkSettings, widths
from fedshift.experiment.toml import SettingsError
from fedshift.rounds.federation import Group
from fedshift.rounds.policy import Policy
from fedshift.rounds.uplink import Uplink
from fedshift.wire.registry import codec_bytes

OTHERS = "others"  # name of the group of clients that are in no named group


def links(experiment: Experiment, uplink: Uplink | None = None) -> tuple[list[Group], Tensor]:
    """Groups of clients with the same uplink, and the group of each client (N,).

    A given `uplink` replaces that of clients with 8 bits or fewer.
    """
    config, clients = experiment.uplink, experiment.data.clients
    common = config.model_dump(include=set(CodingSettings.model_fields), exclude_unset=True)

    def link(bits: Bits, name: str) -> Group:
        coding = common if bits <= 8 else {key: value for key, value in common.items() if key != "codec"}
        rate = config.bandwidth.get(bits) if isinstance(config.bandwidth, dict) else config.bandwidth
        if uplink is not None and bits <= 8:
            codec_bytes(uplink.codec)  # an error now, if it cannot be sent
            return Group(name, uplink, None if isinstance(rate, tuple) else rate, adaptive=True)
        return group_of(name, LinkSettings(**coding, bits=bits, bandwidth=None if isinstance(rate, tuple) else rate))

    if config.group:
        return named_groups(experiment, link)
    by_name = group_bits(experiment)
    groups = [link(bits, name) for name, bits in by_name.items()]
    if isinstance(config.bits, int):
        return groups, torch.zeros(clients, dtype=torch.int64)
    if isinstance(config.bits, tuple):
        places = {bits: i for i, bits in enumerate(by_name.values())}
        return groups, torch.tensor([places[bits] for bits in config.bits])
    if isinstance(config.bits, dict):
        return groups, _populated(groups, interleave(list(config.bits.values()), clients), "uplink.bits")
    return groups, _populated(groups, torch.arange(clients) % len(groups), "uplink.bits")


def group_bits(experiment: Experiment) -> dict[str, Bits]:
    """Bits of each group of clients, by its name in clients.csv; no codec is made, as a user's module may be missing.

    >>> group_bits(Experiment(uplink={"bits": "32+8+4", "codec": "qsgd"}))
    {'32 bit': 32, 'qsgd, 8 bit': 8, 'qsgd, 4 bit': 4}
    """
    config = experiment.uplink
    chosen, quantized = config.policy or config.codec, [width for width in widths(config) if width <= 8]

    def kind(bits: Bits) -> str:
        """Name of clients with these bits."""
        if chosen is None or bits > 8:
            return f"{bits} bit"
        name = chosen.name.rpartition(":")[2]
        return name if len(quantized) == 1 else f"{name}, {bits} bit"

    if isinstance(config.bits, int):
        named = {" ".join(name.split()): link.bits for name, link in config.group.items()}
        return {OTHERS: config.bits} | named if named else {kind(config.bits): config.bits}
    if isinstance(config.bits, str):
        parts = [cast(Bits, int(bits)) for bits in config.bits.split("+")]
        return {f"{kind(bits)}{f' ({i})' * (parts.count(bits) > 1)}": bits for i, bits in enumerate(parts, 1)}
    distinct = sorted(set(config.bits), reverse=True) if isinstance(config.bits, tuple) else config.bits
    return {kind(bits): bits for bits in distinct}


def downlink(experiment: Experiment) -> Uplink:
    """Codec and message of the broadcast."""
    config = experiment.downlink
    broadcast = _uplink("downlink", config, config.bits)
    if broadcast.update and broadcast.codec.quantizer.expands:
        raise SettingsError(
            f"downlink.send = 'updates': errors of {broadcast.codec.quantizer} may exceed the values and would grow, "
            "because an update contains the error of the one before"
        )
    return broadcast


def named_groups(experiment: Experiment, link: Callable[[Bits, str], Group]) -> tuple[list[Group], Tensor]:
    """Assign clients to groups with lists of clients first, then by shares, then to the group OTHERS."""
    config, clients = experiment.uplink, experiment.data.clients
    assert isinstance(config.bits, int)
    groups = [group_of(name, settings) for name, settings in config.group.items()] + [link(config.bits, OTHERS)]
    others = len(groups) - 1
    group = torch.full((clients,), others)
    for i, (name, settings) in enumerate(config.group.items()):
        for client in settings.clients or ():
            if client >= clients or group[client] != others:
                why = f"there are {clients} clients" if client >= clients else "it is already in another group"
                raise SettingsError(f"uplink.group.{name}.clients: client {client}: {why}")
            group[client] = i
    shares = [settings.share or 0.0 for settings in config.group.values()]
    free = torch.nonzero(group == others)[:, 0]
    if any(shares) and len(free):
        scaled = [share * clients / len(free) for share in shares]
        if sum(scaled) > 1 + 1e-6:
            raise SettingsError("uplink.group: the listed clients and the shares add up to more than all clients")
        group[free] = interleave([*scaled, max(0.0, 1 - sum(scaled))], len(free))
    if not (group == others).any():
        groups.pop()
    return groups, _populated(groups, group, "uplink.group")


def bandwidth(experiment: Experiment, groups: Sequence[Group], group: Tensor) -> Tensor | None:
    """Bytes per second of each client (N,); None if the settings have no bandwidth."""
    rates = experiment.uplink.bandwidth
    if isinstance(rates, tuple):
        return torch.tensor(rates)
    if not any(g.bandwidth for g in groups):
        return None
    return torch.tensor([g.bandwidth or math.inf for g in groups])[group]


def _populated(groups: Sequence[Group], group: Tensor, where: str) -> Tensor:
    """The group of each client, after a check that no group is empty."""
    for i, checked in enumerate(groups):
        if not (group == i).any():
            raise SettingsError(
                f"{where}: group '{checked.name}' is empty: its share of {len(group)} clients rounds to 0"
            )
    return group


def group_of(name: str, link: LinkSettings) -> Group:
    return Group(name, _uplink("uplink", link, link.bits), link.bandwidth, adaptive=link.bits <= 8)


def policy_of(experiment: Experiment, given: Policy | None = None) -> Policy | None:
    """The given uplink policy or that of the settings; None without one."""
    config = experiment.uplink.policy
    if given is None and config is None:
        return None
    try:
        policy = given or (config.made() if config else None)
    except ValueError as problem:
        raise SettingsError(f"uplink.{problem}") from None
    if policy and "bandwidth" in policy.needs and not _has_bandwidth(experiment):
        raise SettingsError(f"uplink.policy: {policy} needs bandwidths; set uplink.bandwidth, or that of each group")
    return policy


def _has_bandwidth(experiment: Experiment) -> bool:
    uplink = experiment.uplink
    return uplink.bandwidth is not None or any(group.bandwidth for group in uplink.group.values())


def _uplink(table: str, coding: CodingSettings, bits: int) -> Uplink:
    try:
        codec = coding.codec_for(bits)
        try:
            codec_bytes(codec)
        except ValueError as problem:
            raise ValueError(f"codec: {problem}") from None
        return Uplink(codec, coding.send == "updates", coding.feedback)
    except ValueError as problem:
        raise SettingsError(f"{table}.{problem}") from None


def interleave(shares: Sequence[float], n: int) -> Tensor:
    """Groups of n clients, spread evenly: each client is assigned to the group furthest below its share.

    >>> interleave([0.5, 0.25, 0.25], 8).tolist()
    [0, 1, 2, 0, 0, 1, 2, 0]
    """
    counts, group = [0] * len(shares), []
    for i in range(n):
        g = max(range(len(shares)), key=lambda g: (round(shares[g] * (i + 1) - counts[g], 9), -g))
        counts[g] += 1
        group.append(g)
    return torch.tensor(group)
