"""What is in the way of a Ray cluster is one line that names the setting."""

import socket

import pytest

from infini_model.runtime.errors import UnreachableError, UserError
from infini_model.runtime.ray import connect


def test_a_cluster_that_does_not_answer(monkeypatch):
    """Ray itself, which takes minutes, is not asked: it would answer in other words."""
    with socket.socket() as deaf:  # bound, but not listening
        deaf.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        message = rf"^data\.engine: RAY_ADDRESS={address}: no Ray cluster answers: .*refused$"
        with pytest.raises(UnreachableError, match=message), connect("data.engine"):
            pass


def test_an_address_of_the_environment_that_is_none(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with (
        pytest.raises(UserError, match=r"^RAY_ADDRESS: got 'ray://head:10001': takes auto or HOST"),
        connect("data.engine"),
    ):
        pass
