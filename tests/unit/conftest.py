"""Searches of toys verify forks in their own process."""

from tests.in_place import _forks_are_verified_in_place as _forks_are_verified_in_place
