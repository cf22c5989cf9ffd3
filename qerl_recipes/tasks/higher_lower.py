"""Let the policy find a number by guessing: the environment ``higher_lower``, which has a state over several turns."""

import random
from typing import Any


class HigherLower:
    """Think of a number from 1 to ``largest``, given by the seed alone, and answer each guess with what is left.

    An episode scores 1 if the first guess is right, and for each further guess of ``most`` a share of 1/2 less, down to
    above 1/2. If it does not find the number, it scores half of the share of numbers that it has ruled out.
    """

    def __init__(self, largest: int = 9, most: int = 5) -> None:
        if largest < 1 or most < 1:
            raise ValueError(f"largest and most must be at least 1, not {largest} and {most}")
        self._largest, self._most = largest, most

    def reset(self, seed: int = 0, **row: Any) -> str:
        self._number = random.Random(seed).randint(1, self._largest)
        self._low, self._high = 1, self._largest
        self._guesses, self._is_found = 0, False
        return self._range()

    def guess(self, number: int) -> str:
        """Guess the number that was thought of.

        Args:
            number: The guess.

        Returns:
            "=" if this is the number, else the range in which it is, such as 6-9.
        """
        if not self._is_found:
            self._guesses += 1
            self._is_found = number == self._number
        if number < self._number:
            self._low = max(self._low, number + 1)
        elif number > self._number:
            self._high = min(self._high, number - 1)
        return "=" if self._is_found else self._range()

    def _range(self) -> str:
        return f"{self._low}-{self._high}"

    def get_reward(self) -> float:
        if self._is_found and self._guesses <= self._most:
            return 1 - (self._guesses - 1) / (2 * self._most)
        return (self._largest - 1 - self._high + self._low) / (2 * self._largest)
