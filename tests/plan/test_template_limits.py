"""A chat template is a program: its time and its memory are limited, whatever it does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from llmtrain.data.chat.conversation import Conversation, RowError
from llmtrain.data.chat.template import ChatTemplate
from llmtrain.errors import DataError
from llmtrain.plan.facts import template_limits as limits
from llmtrain.plan.facts.template_limits import limited_templates
from llmtrain.plan.facts.vocabulary import control_tokens

MESSAGES = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize("source", ["{{ 10 ** (10 ** 8) }}", ENDLESS, "{{ 'a' * 10 ** 10 }}"])
def test_a_template_that_exceeds_its_limits_is_refused(source, monkeypatch):
    monkeypatch.setattr(limits, "CPU_S", 0)
    with limited_templates(), pytest.raises(DataError, match="does not end within 0 s") as error:
        ChatTemplate(source).render_each([Conversation(MESSAGES, (True, True))])
    assert error.value.problems[0].field == "data.chat_template"


def test_a_template_whose_tokens_a_plan_looks_for_is_limited_as_well(monkeypatch):
    monkeypatch.setattr(limits, "CPU_S", 0)
    with pytest.raises(DataError, match="does not end within 0 s"):
        control_tokens(ENDLESS)
    assert limits._Shared.worker is None


def test_a_text_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(limits, "MAX_CHARACTERS", 100)
    with limited_templates(), pytest.raises(RowError, match="it writes 101 characters, of at most 100"):
        ChatTemplate("{{ 'a' * 101 }}").render(MESSAGES)


def test_a_limited_template_renders_the_same_in_every_thread():
    template, many = ChatTemplate(PLAIN), [Conversation(MESSAGES, (True, True))] * 10
    expected = template.render_each(many)
    with limited_templates(), ThreadPoolExecutor(2) as threads:
        assert list(threads.map(template.render_each, [many] * 4)) == [expected] * 4
        with pytest.raises(RowError, match="division by zero"):
            ChatTemplate("{{ 1 / 0 }}").render(MESSAGES)
        assert template.render(MESSAGES) == "ab"
    assert limits._Shared.worker is None
