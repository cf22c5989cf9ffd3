"""Run one environment in an interpreter of its own, and answer calls of its methods over a socket.

    VENV/bin/python environment_server.py FILE_DESCRIPTOR PATH ARGUMENTS

That interpreter need not have this package, so this file imports the standard library alone. The first line that it
writes describes the class; each line after it answers a call. Lines, and ARGUMENTS of the class, are JSON. The process
ends when the other end of the socket is closed.
"""

import asyncio
import importlib
import inspect
import json
import operator
import os
import socket
import sys
import traceback


def made(path, arguments):
    module, _, name = path.rpartition(":" if ":" in path else ".")
    sys.path[0] = os.getcwd()  # in place of the folder of this file
    return operator.attrgetter(name)(importlib.import_module(module))(**arguments)


def described(environment):
    """Return the class's name and, of each public method, what its docstring and signature say."""
    members = inspect.getmembers(type(environment), inspect.isfunction)
    methods = [(name, function) for name, function in members if not name.startswith("_")]
    return {
        "name": type(environment).__name__,
        "methods": {
            name: {
                "doc": inspect.getdoc(function),
                "parameters": [parameter(one) for one in inspect.signature(function).parameters.values()],
                "returns": type_text(inspect.signature(function).return_annotation),
            }
            for name, function in methods
        },
    }


def parameter(one):
    """Return name, kind, type as text, and default (a list of one, or none) of a method's parameter."""
    default = [] if one.default is one.empty else [one.default]
    return {"name": one.name, "kind": int(one.kind), "type": type_text(one.annotation), "default": default}


def type_text(annotation):
    """Return a type as Python writes it; None if there is none."""
    if annotation is inspect.Signature.empty:
        return None
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def answered(environment, request):
    """Return what a method or a public attribute of the environment gives, or why it failed."""
    try:
        value = getattr(environment, request["name"])
        if "arguments" in request:
            value = value(**request["arguments"])
            if inspect.isawaitable(value):
                value = asyncio.run(awaited(value))
    except Exception as error:
        if request["name"] in ("reset", "get_reward"):
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {error}"}
        return {"error": str(error) or type(error).__name__}
    if "arguments" in request and request["name"] not in ("reset", "get_reward"):
        value = value if isinstance(value, list) else str(value)  # as TRL makes it a message
    return {"value": value}


async def awaited(value):
    return await value


def main():
    descriptor, path, arguments = sys.argv[1:]
    connection = socket.socket(fileno=int(descriptor))
    requests, answers = connection.makefile(encoding="utf-8"), connection.makefile("w", encoding="utf-8")

    def send(answer):
        answers.write(json.dumps(answer, default=str) + "\n")
        answers.flush()

    try:
        environment = made(path, json.loads(arguments))
        send(described(environment))
    except Exception as error:
        send({"error": f"{type(error).__name__}: {error}"})
        return
    for line in requests:
        send(answered(environment, json.loads(line)))


if __name__ == "__main__":
    main()
