"""Client libraries that ask for typed answers, and agents that run to their end: all return what the library parsed."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any, Literal

from tests.support.cluster.client_libraries import KEY, QUIET, TIMEOUT_S
from tests.support.cluster.tool_clients import ASK, MAX_TOKENS, Unit, langchain_client, openai_client

NAMED: Any = {"type": "function", "name": "Unit"}


def openai_chat(url: str, model: str) -> dict[str, Any]:
    """The official client: a typed answer in one piece, and the same one streamed."""
    client = openai_client(url)
    options: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": ASK}],
        "response_format": Unit,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    made = client.chat.completions.parse(**options).choices[0].message.parsed
    with client.chat.completions.stream(**options) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_completion().choices[0].message.parsed == made
    assert kinds[-1] == "content.done"
    return dict(made.model_dump())


def openai_responses(url: str, model: str) -> dict[str, Any]:
    """Responses with a typed text, in one piece and streamed."""
    client = openai_client(url)
    options: dict[str, Any] = {
        "model": model,
        "input": ASK,
        "text_format": Unit,
        "max_output_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    made = client.responses.parse(**options)
    with client.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert "response.output_text.done" in kinds
    assert streamed.output_parsed == made.output_parsed
    return dict(made.output_parsed.model_dump())


def openai_responses_tools(url: str, model: str) -> dict[str, Any]:
    """Responses that call a tool, unstreamed and streamed; the call's result is sent in a response that continues the
    first.
    """
    import openai

    client = openai_client(url)
    tool = openai.pydantic_function_tool(Unit)["function"]
    options: dict[str, Any] = {
        "model": model,
        "tools": [{"type": "function", **tool}],
        "tool_choice": NAMED,
        "max_output_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    made = client.responses.parse(input=ASK, **options)
    with client.responses.stream(input=ASK, **options) as stream:
        kinds = [event.type for event in stream]
        [streamed] = stream.get_final_response().output
    assert kinds.count("response.function_call_arguments.done") == 1
    [call] = made.output
    assert streamed.arguments == call.arguments
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    after = {**options, "max_output_tokens": 5, "tool_choice": "none"}
    again = client.responses.create(input=[result], previous_response_id=made.id, **after)
    listed = client.responses.input_items.list(again.id, order="asc")
    assert [item.type for item in listed] == ["message", "function_call", "function_call_output"]
    return dict(call.parsed_arguments)


def langchain_schema(url: str, model: str) -> dict[str, Any]:
    """LangChain's structured output, by a schema; once more with tools beside it, as its agents ask."""
    llm = langchain_client(url, model)
    bound = llm.with_structured_output(Unit, method="json_schema", include_raw=True, tools=[Unit], strict=True)
    answer = bound.invoke(ASK)
    assert answer["parsing_error"] is None
    called = [call["args"] for call in answer["raw"].tool_calls]
    made = llm.with_structured_output(Unit, method="json_schema").invoke(ASK)
    assert called or isinstance(answer["parsed"], Unit)
    return dict(made.model_dump())


def langchain_responses(url: str, model: str) -> dict[str, Any]:
    """LangChain over responses: a tool by its name, its result, and the answer after it."""
    from langchain_core.messages import HumanMessage, ToolMessage

    llm = langchain_client(url, model, use_responses_api=True)
    answer = llm.bind_tools([Unit], tool_choice="Unit").invoke(ASK)
    call = answer.tool_calls[0]
    again = llm.invoke([HumanMessage(ASK), answer, ToolMessage("done", tool_call_id=call["id"])], max_tokens=5)
    assert isinstance(again.text, str)
    typed = llm.with_structured_output(Unit, method="json_schema").invoke(ASK)
    assert isinstance(typed, Unit)
    return dict(call["args"])


def instructor_schema(url: str, model: str) -> dict[str, Any]:
    """Instructor's mode that names a schema."""
    return _instructor(url, model, "JSON_SCHEMA", max_tokens=MAX_TOKENS)


def instructor_responses(url: str, model: str) -> dict[str, Any]:
    """Instructor's tools over responses."""
    return _instructor(url, model, "RESPONSES_TOOLS", max_output_tokens=MAX_TOKENS)


def _instructor(url: str, model: str, mode: str, **options: Any) -> dict[str, Any]:
    import instructor

    client: Any = instructor.from_openai(openai_client(url), mode=instructor.Mode[mode])
    asked: Any = [{"role": "user", "content": ASK}]
    made = client.create(model=model, messages=asked, response_model=Unit, max_retries=0, temperature=0, **options)
    return dict(made.model_dump())


def instructor_messages(url: str, model: str) -> dict[str, Any]:
    """Instructor's tools over Anthropic's client."""
    import anthropic
    import instructor

    plain = anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=TIMEOUT_S)
    client: Any = instructor.from_anthropic(plain, mode=instructor.Mode.TOOLS)
    made = client.create(
        model=model,
        messages=[{"role": "user", "content": ASK}],
        response_model=Unit,
        max_tokens=MAX_TOKENS,
        max_retries=0,
    )
    return dict(made.model_dump())


def llama_index_prediction(url: str, model: str) -> dict[str, Any]:
    """LlamaIndex's structured prediction."""
    from llama_index.core.prompts import PromptTemplate
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        api_base=f"{url}/v1",
        api_key=KEY,
        model=model,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        max_retries=0,
        timeout=TIMEOUT_S,
        max_tokens=MAX_TOKENS,
    )
    made: Any = llm.structured_predict(Unit, PromptTemplate(ASK))
    assert llm.as_structured_llm(Unit).complete(ASK).raw == made
    return dict(made.model_dump())


def pydantic_ai_agent(url: str, model: str) -> dict[str, Any]:
    """Pydantic AI: a tool in the first step, and behind its result a typed answer by a schema."""
    from pydantic_ai import Agent, NativeOutput, RunContext
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    called: list[str] = []

    def settings(context: RunContext[None]) -> Any:
        choice = ["set_unit"] if context.run_step == 1 else "none"
        return {"max_tokens": MAX_TOKENS, "temperature": 0, "parallel_tool_calls": False, "tool_choice": choice}

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key=KEY)
    agent = Agent(OpenAIChatModel(model, provider=provider), output_type=NativeOutput(Unit), model_settings=settings)

    @agent.tool_plain
    def set_unit(unit: Literal["celsius", "kelvin"]) -> str:
        """Set the unit of temperature."""
        called.append(unit)
        return unit

    made = asyncio.run(agent.run(ASK)).output
    assert len(called) == 1
    return dict(made.model_dump())


def agents_chat(url: str, model: str) -> dict[str, Any]:
    """OpenAI's agents over chats: a tool, and behind its result a typed answer."""
    import agents

    return _agents(url, model, agents.OpenAIChatCompletionsModel)


def agents_responses(url: str, model: str) -> dict[str, Any]:
    """The same over responses."""
    import agents

    return _agents(url, model, agents.OpenAIResponsesModel)


def _agents(url: str, model: str, kind: Callable[..., Any]) -> dict[str, Any]:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    called: list[str] = []

    def set_unit(unit: Literal["celsius", "kelvin"]) -> str:
        """Set the unit of temperature."""
        called.append(unit)
        return unit

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT_S) as client:
            agent = agents.Agent(
                name="units",
                model=kind(model=model, openai_client=client),
                # A model with random weights would call it for ever.
                tools=[agents.function_tool(set_unit, is_enabled=lambda *_: not called)],
                output_type=Unit,
                model_settings=agents.ModelSettings(
                    tool_choice="required", parallel_tool_calls=False, max_tokens=MAX_TOKENS, temperature=0
                ),
            )
            return (await agents.Runner.run(agent, ASK)).final_output

    made = asyncio.run(run())
    assert len(called) == 1
    return dict(made.model_dump())


def anthropic_typed(url: str, model: str) -> dict[str, Any]:
    """Anthropic's client: a typed answer in one piece, and the same one streamed."""
    client = _anthropic(url)
    options: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": ASK}],
        "output_format": Unit,
        "max_tokens": MAX_TOKENS,
        "extra_body": {"temperature": 0},
    }
    made = client.messages.parse(**options).parsed_output
    with client.messages.stream(**options) as stream:
        assert stream.get_final_message().parsed_output == made
    return dict(made.model_dump())


def anthropic_tools(url: str, model: str) -> dict[str, Any]:
    """A tool in one piece and streamed, counted tokens, and its result sent back."""
    client = _anthropic(url)
    user = {"role": "user", "content": ASK}
    tools = [{"name": "Unit", "description": "The unit.", "input_schema": Unit.model_json_schema()}]
    options: dict[str, Any] = {"model": model, "messages": [user], "tools": tools}
    choice: Any = {"type": "tool", "name": "Unit"}
    run: Any = {"max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}}
    answer = client.messages.create(tool_choice=choice, **options, **run)
    with client.messages.stream(tool_choice=choice, **options, **run) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    counted = client.messages.count_tokens(tool_choice=choice, **options).input_tokens
    [call] = answer.content
    assert (answer.stop_reason, streamed.stop_reason) == ("tool_use", "tool_use")
    assert (streamed.content[0].name, streamed.content[0].input) == (call.name, call.input)
    assert "input_json" in kinds
    assert counted == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "done"}]}
    turns = [user, {"role": "assistant", "content": answer.content}, result]
    after = client.messages.create(
        **{**options, **run, "messages": turns, "max_tokens": 5}, tool_choice={"type": "none"}
    )
    assert after.content[0].type == "text"
    return dict(call.input)


def anthropic_runner(url: str, model: str) -> dict[str, Any]:
    """Its helper that runs tools: one call, whose result ends the loop's first round."""
    import anthropic

    called: list[str] = []

    @anthropic.beta_tool
    def set_unit(unit: Literal["celsius", "kelvin"]) -> str:
        """Set the unit of temperature."""
        called.append(unit)
        return unit

    runner = _anthropic(url).beta.messages.tool_runner(
        model=model,
        messages=[{"role": "user", "content": ASK}],
        tools=[set_unit],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_tokens=MAX_TOKENS,
        max_iterations=2,
    )
    answers = [message.stop_reason for message in runner]
    assert answers == ["tool_use", "tool_use"]
    return {"unit": called[0]}


def _anthropic(url: str) -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=TIMEOUT_S)


FORM_CLIENTS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "openai chat": openai_chat,
    "openai responses": openai_responses,
    "openai responses with tools": openai_responses_tools,
    "langchain-openai json_schema": langchain_schema,
    "langchain-openai responses": langchain_responses,
    "instructor JSON_SCHEMA": instructor_schema,
    "instructor RESPONSES_TOOLS": instructor_responses,
    "instructor TOOLS over messages": instructor_messages,
    "llama-index structured prediction": llama_index_prediction,
    "pydantic-ai agent": pydantic_ai_agent,
    "openai-agents on chats": agents_chat,
    "openai-agents on responses": agents_responses,
    "anthropic output_format": anthropic_typed,
    "anthropic tools": anthropic_tools,
    "anthropic tool_runner": anthropic_runner,
}


def ask_typed(name: str, url: str, model: str) -> dict[str, Any]:
    """The answer, or the arguments, as a library read them."""
    os.environ.update(QUIET)
    return FORM_CLIENTS[name](url, model)
