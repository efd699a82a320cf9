"""An agent loop: the model calls two tools, their results go back into the conversation, until it answers in words.

    python examples/agent.py [MODEL]

The default model has 135M parameters and was not trained on tools, so the first call is asked for with
`tool_choice="required"`. A larger model, such as Qwen/Qwen3-4B-GGUF, decides by itself.
"""

import json
import sys
from typing import Any

import jaxspec


def get_weather(city: str) -> str:
    """The weather of a city, from a table."""
    return {"Rome": "18 degrees, sunny", "Oslo": "3 degrees, snow"}.get(city, "unknown")


def add(a: float, b: float) -> str:
    """The sum of two numbers."""
    return str(a + b)


FUNCTIONS = {"get_weather": get_weather, "add": add}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    },
]


def run_call(call: dict[str, Any]) -> str:
    """The result of a call; a mistake of the model's is told to it."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    try:
        return FUNCTIONS[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


def main() -> None:
    """Ask, run the calls, and ask again, at most five times."""
    llm = jaxspec.LLM(sys.argv[1] if len(sys.argv) > 1 else None)
    sampling = jaxspec.SamplingParams(max_tokens=128)
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
    choice = "auto" if len(sys.argv) > 1 else "required"
    for _ in range(5):
        answer = llm.chat(messages, sampling, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        messages.append(answer.message)
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            result = run_call(dict(call))
            print(f"{call['function']['name']}({call['function']['arguments']}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        choice = "auto" if len(sys.argv) > 1 else "none"
    print(f"answer: {messages[-1]['content']}")


if __name__ == "__main__":
    main()
