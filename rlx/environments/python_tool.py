"""Python as a tool, in the sandbox of `rlx.environments.sandbox`."""

from dataclasses import fields
from typing import Any

from rlx.environments.sandbox import SandboxLimits, check_isolation, run_python
from rlx.environments.tools import ToolEnvironment, Tools
from rlx.user_code import UserCodeError


class PythonTool(ToolEnvironment):
    """A conversation with the tool `python`, which runs a program and returns what it prints. Each call begins anew.

    Args:
        tool_format: see ToolEnvironment.
        limits: of `rlx.environments.sandbox.SandboxLimits`, by name.
    """

    def __init__(self, tool_format: str = "tags", **limits: Any):
        bounds = SandboxLimits(**limits)

        async def python(code: str) -> str:
            """Run a Python program and return what it prints.

            Args:
                code: The program. It has no network, and begins without what earlier programs have made.
            """
            output, fault = await run_python(code, bounds)
            if fault:
                raise ProgramFailed(f"{fault}\n{output}".rstrip())
            return output

        super().__init__(Tools([python]), tool_format)

    @staticmethod
    def prepare(**kwargs: Any) -> None:
        """Check the arguments and the sandbox once in a process. Raises UserCodeError."""
        known = {field.name for field in fields(SandboxLimits)}
        unknown = kwargs.keys() - known - {"tool_format"}
        if unknown:
            raise UserCodeError(
                f"environment.kwargs: got {', '.join(sorted(unknown))}, expected of {', '.join(sorted(known))}"
            )
        check_isolation(SandboxLimits(**{name: value for name, value in kwargs.items() if name in known}))


class ProgramFailed(Exception):
    """The model's program failed; the text has what it printed."""
