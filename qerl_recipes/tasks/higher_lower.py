"""Let the policy find a number by guessing: the environment ``higher_lower``, which has a state over several turns."""

import random
from typing import Any


class HigherLower:
    """Think of a number from 1 to ``largest``, and answer guesses until it is found.

    The number follows from the seed alone, so that all episodes of a group look for the same one. An episode scores 1
    if the first guess is right, and less for each further one: 1 - (guesses - 1) / ``most``. It scores 0 if ``most``
    guesses do not find the number. Raises ValueError for a ``largest`` or ``most`` below 1.
    """

    def __init__(self, largest: int = 9, most: int = 5) -> None:
        if largest < 1 or most < 1:
            raise ValueError(f"largest and most must be at least 1, not {largest} and {most}")
        self._largest, self._most = largest, most

    def reset(self, seed: int = 0, **row: Any) -> str:
        self._number = random.Random(seed).randint(1, self._largest)
        self._guesses, self._is_found = 0, False
        return f"1-{self._largest}"

    def guess(self, number: int) -> str:
        """Guess the number that was thought of.

        Args:
            number: The guess.

        Returns:
            "+" if the number is higher than the guess, "-" if it is lower, and "=" if this is the number.
        """
        if not self._is_found:
            self._guesses += 1
            self._is_found = number == self._number
        return "+" if number < self._number else "-" if number > self._number else "="

    def get_reward(self) -> float:
        if not self._is_found or self._guesses > self._most:
            return 0.0
        return 1 - (self._guesses - 1) / self._most
