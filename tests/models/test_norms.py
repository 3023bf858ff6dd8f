"""Group norm in place of batch norm, and batch norm that is frozen."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fairwind as fw
from own_parts import pictures, small_cnn


def test_a_layer_keeps_its_weights_and_gets_as_many_groups_as_its_channels_allow() -> None:
    groups = {3: 1, 8: 1, 16: 2, 24: 3, 64: 8, 100: 10, 512: 32}
    for channels, expected in groups.items():
        norm = nn.BatchNorm2d(channels, eps=1e-3).requires_grad_(False)
        nn.init.normal_(norm.weight)
        model: Any = nn.Sequential(nn.Sequential(norm), nn.ReLU())
        made: Any = fw.models.to_group_norm(model)
        group = made[0][0]
        assert (type(group), group.num_groups, group.eps) == (nn.GroupNorm, expected, 1e-3)
        assert torch.equal(group.weight, norm.weight)
        assert not group.weight.requires_grad
        assert type(model[0][0]) is nn.BatchNorm2d  # is not changed
    few: Any = fw.models.to_group_norm(nn.BatchNorm2d(64), groups=4)
    assert few.num_groups == 4
    plain: Any = fw.models.to_group_norm(nn.BatchNorm1d(64, affine=False))
    assert plain.weight is None
    with pytest.raises(fw.InputError, match="groups=0"):
        fw.models.to_group_norm(model, groups=0)


def test_an_instance_norm_stays_one() -> None:
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    nn.init.normal_(norm.weight)
    x = torch.randn(3, 4, 5, 5)
    torch.testing.assert_close(fw.models.to_group_norm(norm)(x), norm.train()(x))


def test_a_task_says_that_group_norm_is_trained() -> None:
    with pytest.warns(UserWarning, match=r"group norm takes the place of batch norm \(1, 6\)"):
        task = fw.Task(small_cnn(), pictures([9, 8]), batch_norm="group", rounds=1)
    result = fw.simulate(task, "fedavg", progress=False)
    assert not any("running" in name for name in result.state_dict)
    assert isinstance(result.model, nn.Module)


def test_frozen_layers_stay_as_they_were_given() -> None:
    model = small_cnn()
    model(torch.randn(7, 1, 6, 6).double())  # moves statistics
    before = copy.deepcopy(model.state_dict())
    task = fw.Task(model, pictures([9, 8]), batch_norm="frozen", rounds=2)
    trained = fw.simulate(task, "fedavg", progress=False).state_dict
    for name, value in before.items():
        assert torch.equal(trained[name], value) == (name[0] in "16"), name
    untracked = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(36, track_running_stats=False), nn.Linear(36, 3))
    with pytest.raises(fw.InputError, match=r"layer '1' is BatchNorm1d without running statistics"):
        fw.Task(untracked, pictures([9, 8]), batch_norm="frozen")
