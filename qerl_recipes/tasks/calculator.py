"""Work out sums: the tool ``calculator``."""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

LONGEST = 200  # characters
OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
SIGNS: dict[type, Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator(expression: str) -> str:
    """Work out an expression of numbers with + - * / and brackets, such as 12-3.

    Args:
        expression: The expression to work out.

    Returns:
        The result.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has more than {LONGEST} characters")
    result = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(result if result.denominator == 1 else float(result))


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](_value(left), _value(right))
        case ast.UnaryOp(operation, operand) if type(operation) in SIGNS:
            return SIGNS[type(operation)](_value(operand))
    raise ValueError("only numbers, + - * / and brackets can be worked out")
