"""The parts of the workloads against what the literature says, or against a slower way of computing the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from hpstage.workloads import (
    cifar,
    evolution,
    expressions,
    gpt,
    mobilenet,
    recommender,
    resnet,
    tree_lstm,
    unet,
    wide_resnet,
)


def millions(model: nn.Module) -> float:
    return sum(weight.numel() for weight in model.parameters()) / 1e6


def test_networks_have_the_published_numbers_of_parameters() -> None:
    with torch.device("meta"):
        assert round(millions(resnet.resnet(20)), 2) == 0.27
        assert round(millions(resnet.resnet(56)), 2) == 0.85
        assert round(millions(wide_resnet.wide_resnet(16, 4)), 1) == 2.7
        assert round(millions(mobilenet.MobileNetV2("").model({})), 1) == 2.2
        baby = gpt.GPT(layers=6, heads=6, width=384, block=256)
    # nanoGPT counts 10.65 million with 65 characters, without positions.
    assert round(millions(baby) - (256 - 65 + 256) * 384 / 1e6, 2) == 10.65


@pytest.mark.parametrize("depth", [7, 18, 2])
def test_an_invalid_resnet_depth_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match=f"depth is {depth}; it must be 6n"):
        resnet.resnet(depth)


def test_augmented_images_are_crops_of_padded_images_and_half_are_flipped() -> None:
    torch.manual_seed(0)
    images = torch.randint(1, 256, (64, 3, 8, 8), dtype=torch.uint8)
    padded = nn.functional.pad(images, (2, 2, 2, 2))
    flipped = 0
    for found, whole in zip(cifar.augment(images, padding=2), padded, strict=True):
        crops = [whole[:, y : y + 8, x : x + 8] for y in range(5) for x in range(5)]
        straight = sum(found.equal(crop) for crop in crops)
        mirrored = sum(found.equal(crop.flip(2)) for crop in crops)
        assert straight + mirrored == 1
        flipped += mirrored
    assert 20 < flipped < 44


def test_augmentation_with_the_same_seed_gives_the_same_images() -> None:
    images = torch.arange(2 * 3 * 8 * 8, dtype=torch.uint8).reshape(2, 3, 8, 8)
    torch.manual_seed(1)
    first = cifar.augment(images)
    torch.manual_seed(1)
    assert cifar.augment(images).equal(first)


@pytest.mark.parametrize("side", [0, 1, 4, 5])
def test_cutout_blanks_a_square_clipped_at_the_image_border(side: int) -> None:
    torch.manual_seed(0)
    blank = (mobilenet.cutout(torch.ones(50, 3, 16, 16), side) == 0).float()
    assert blank[:, 0].equal(blank[:, 1])
    heights, widths = blank[:, 0].amax(2).sum(1), blank[:, 0].amax(1).sum(1)
    assert (heights * widths).equal(blank[:, 0].sum((1, 2)))
    assert heights.max() == widths.max() == side


def test_the_tree_lstm_gives_the_same_values_for_a_forest_as_for_trees_node_by_node() -> None:
    torch.manual_seed(0)
    model = tree_lstm.ChildSum(8)
    made = expressions.Expressions(12, depth=3, seed=0)
    trees = [made[index] for index in range(12)]

    def node(tree: expressions.Tree, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        below = [i for i, parent in enumerate(tree.nodes[:, 1].tolist()) if parent == at and i != at]
        cells = [node(tree, child) for child in below]
        x = model.words(tree.nodes[at, 0])
        total = sum((h for h, _ in cells), torch.zeros(8))
        i, o, u = (model.gates_of_word(x) + model.gates_of_sum(total)).chunk(3)
        kept = [torch.sigmoid(model.forget_of_word(x) + model.forget_of_child(h)) * c for h, c in cells]
        c = torch.sigmoid(i) * torch.tanh(u) + sum(kept, torch.zeros(8))
        return torch.sigmoid(o) * torch.tanh(c), c

    expected = torch.stack([model.value(node(tree, len(tree.nodes) - 1)[0]) for tree in trees])
    torch.testing.assert_close(model(expressions.forest(trees)), expected)


def test_labels_of_generated_expressions_are_their_values() -> None:
    made = expressions.Expressions(50, depth=3, seed=0)
    for words_parents_heights, value in (made[index] for index in range(len(made))):
        values: dict[int, int] = {}
        for at, (word, _, height) in enumerate(words_parents_heights.tolist()):
            below = [values[i] for i in range(at) if words_parents_heights[i, 1] == at]
            values[at] = word if word < 10 else expressions.OPERATORS[word - 10](below)
            assert (word < 10) == (height == 0) == (not below)
        assert values[len(words_parents_heights) - 1] == value


def test_recommender_histories_are_the_last_films_rated_by_the_user() -> None:
    table = np.array([[1, 7, 5, 0], [2, 8, 4, 1], [1, 9, 3, 2], [1, 8, 2, 3], [1, 4, 1, 4]])
    assert recommender.histories(table, 2).tolist() == [[0, 0], [0, 0], [7, 0], [7, 9], [9, 8]]


def test_segmentation_masks_cover_the_bright_discs_of_images() -> None:
    images, masks = unet.discs(20, 32, seed=0)
    assert images.shape == masks.shape == (20, 1, 32, 32)
    assert images[masks > 0].mean() > images[masks == 0].mean() + 0.4
    assert unet.dice(masks, masks) == 1


def test_the_cart_pole_moves_by_its_equations_and_falls_without_balancing() -> None:
    still = np.zeros((1, 4))
    pushed = evolution.moved(still, np.array([True]))[0]
    # By hand: 10 N on 1.1 kg give 9.0909 m/s^2 with no pole to turn; the pole turns back, the cart gains.
    turn = -(10 / 1.1) / (0.5 * (4 / 3 - 0.1 / 1.1))
    assert pushed == pytest.approx([0, 0.02 * (10 / 1.1 - 0.1 * 0.5 * turn / 1.1), 0, 0.02 * turn])
    always_right = np.zeros((1, 6 * 2))
    always_right[0, 8:10], always_right[0, 10:] = 1, 1
    assert 5 < evolution.lengths(always_right, still, 500)[0] < 15


def test_the_evolution_strategy_learns_to_balance_the_pole() -> None:
    np.random.seed(0)
    hp = {"population": 32, "sigma": 0.5, "lr": 0.3, "momentum": 0.9}
    strategy = evolution.Evolution(episodes=2, limit=100)
    strategy.setup(hp)
    before = strategy.evaluate()["length"]
    for step in range(20):
        strategy.train(step, hp)
    assert before < 50 < 80 < strategy.evaluate()["length"]
