"""Client libraries that call a tool, each in its own way: all return the arguments that the library parsed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

from tests.support.cluster.client_libraries import KEY, QUIET, TIMEOUT_S

MAX_TOKENS = 400
"""Large enough for the whitespace within arguments, of which a model with random weights writes much."""
ASK = "Which unit?"


class Unit(BaseModel):
    """A unit of temperature."""

    unit: Literal["celsius", "kelvin"]


def set_unit(unit: Literal["celsius", "kelvin"]) -> str:
    """Set the unit of temperature."""
    return unit


def openai_client(url: str) -> Any:
    """The official client."""
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_S)


def openai_parse(url: str, model: str) -> dict[str, Any]:
    """The official client, which validates the arguments against the model from which the tool was made."""
    import openai

    answer = openai_client(url).chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": ASK}],
        tools=[openai.pydantic_function_tool(Unit)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=MAX_TOKENS,
    )
    call = answer.choices[0].message.tool_calls[0]
    assert answer.choices[0].finish_reason == "tool_calls"
    return dict(call.function.parsed_arguments.model_dump())


def openai_stream(url: str, model: str) -> dict[str, Any]:
    """Its stream helper, with the tool named; the call and its result are sent back."""
    import openai

    client = openai_client(url)
    messages: list[Any] = [{"role": "user", "content": ASK}]
    with client.chat.completions.stream(
        model=model,
        messages=messages,
        tools=[openai.pydantic_function_tool(Unit)],
        tool_choice={"type": "function", "function": {"name": "Unit"}},
        max_tokens=MAX_TOKENS,
    ) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    call = message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    # As its users send it back: what the helper parsed is no part of the API.
    said = message.model_dump(exclude={"parsed": True, "tool_calls": {"__all__": {"function": {"parsed_arguments"}}}})
    again = client.chat.completions.create(model=model, messages=[*messages, said, result], max_tokens=5)
    assert again.choices[0].message.content is not None
    return dict(call.function.parsed_arguments.model_dump())


def langchain_client(url: str, model: str, **options: Any) -> Any:
    """LangChain's."""
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        base_url=f"{url}/v1",
        api_key=KEY,
        max_retries=0,
        timeout=TIMEOUT_S,
        model=model,
        max_tokens=MAX_TOKENS,
        **options,
    )


def langchain_tools(url: str, model: str) -> dict[str, Any]:
    """LangChain's tools: one is called, and its result goes back; streamed chunks add up to the same kind of call."""
    from langchain_core.messages import ToolMessage

    llm = langchain_client(url, model)
    bound = llm.bind_tools([Unit], tool_choice="Unit")
    answer = bound.invoke(ASK)
    call = answer.tool_calls[0]
    again = llm.invoke([("user", ASK), answer, ToolMessage("done", tool_call_id=call["id"])], max_tokens=5)
    assert isinstance(again.content, str)
    whole = None
    for chunk in bound.stream(ASK):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.tool_calls[0]["name"] == "Unit"
    return dict(call["args"])


def langchain_structured(url: str, model: str) -> dict[str, Any]:
    """LangChain's structured output, by a tool."""
    made = langchain_client(url, model).with_structured_output(Unit, method="function_calling").invoke(ASK)
    return dict(made.model_dump())


def instructor_tools(url: str, model: str) -> dict[str, Any]:
    """Instructor's mode that calls a tool."""
    import instructor

    client = instructor.from_openai(openai_client(url), mode=instructor.Mode.TOOLS)
    made = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": ASK}],
        response_model=Unit,
        max_tokens=MAX_TOKENS,
        max_retries=0,
    )
    return dict(made.model_dump())


def llama_index_tools(url: str, model: str) -> dict[str, Any]:
    """LlamaIndex's function calling."""
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        api_base=f"{url}/v1",
        api_key=KEY,
        model=model,
        is_chat_model=True,
        is_function_calling_model=True,
        max_retries=0,
        timeout=TIMEOUT_S,
        max_tokens=MAX_TOKENS,
    )
    answer = llm.chat_with_tools(
        [FunctionTool.from_defaults(set_unit, fn_schema=Unit)], user_msg=ASK, tool_required=True
    )
    return dict(llm.get_tool_calls_from_response(answer)[0].tool_kwargs)


def pydantic_ai_output(url: str, model: str) -> dict[str, Any]:
    """Pydantic AI, whose typed output is a tool that must be called."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    agent = Agent(OpenAIChatModel(model, provider=provider), output_type=Unit)
    made = asyncio.run(agent.run(ASK, model_settings={"max_tokens": MAX_TOKENS, "parallel_tool_calls": False})).output
    return dict(made.model_dump())


def agents_tool(url: str, model: str) -> dict[str, Any]:
    """OpenAI's agents, over chat completions, which run the tool and end with its result."""
    import agents
    import openai

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_S)
    agent = agents.Agent(
        name="units",
        model=agents.OpenAIChatCompletionsModel(model, client),
        tools=[agents.function_tool(set_unit)],
        model_settings=agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=MAX_TOKENS),
        tool_use_behavior="stop_on_first_tool",
    )
    return {"unit": asyncio.run(agents.Runner.run(agent, ASK)).final_output}


TOOL_CLIENTS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "openai parse": openai_parse,
    "openai stream": openai_stream,
    "langchain-openai bind_tools": langchain_tools,
    "langchain-openai with_structured_output": langchain_structured,
    "instructor TOOLS": instructor_tools,
    "llama-index": llama_index_tools,
    "pydantic-ai": pydantic_ai_output,
    "openai-agents": agents_tool,
}


def call_tool(name: str, url: str, model: str) -> dict[str, Any]:
    """The arguments with which a library calls its tool."""
    os.environ.update(QUIET)
    return TOOL_CLIENTS[name](url, model)
