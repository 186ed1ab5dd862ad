"""Messages and receives meet in order: a random run against a simple model."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from roost.comm.mailbox import ANY, Mailbox, Message, Receive

SOURCES = ("a:0", "a:1", "b:0")
sources = st.sampled_from(SOURCES)
tags = st.sampled_from((None, "x"))


class MailboxMachine(RuleBasedStateMachine):
    """Each receive gets the oldest message that it takes; each message goes to the oldest receive that takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.mailbox: Mailbox = Mailbox()
        self.messages: list[Message] = []
        self.receives: list[Receive] = []
        self.count = 0

    @rule(source=sources, tag=tags)
    def deliver(self, source, tag):
        self.count += 1
        message = Message(source, "1", tag, self.count, 10)
        # One that waits for this source alone comes before those that wait for any.
        fitting = [receive for receive in self.receives if receive.takes(message)]
        fitting.sort(key=lambda receive: receive.source.endswith(ANY))
        assert self.mailbox.deliver(message) is (fitting[0] if fitting else None)
        self.receives.remove(fitting[0]) if fitting else self.messages.append(message)

    @rule(source=st.sampled_from((*SOURCES, "a:*", ANY)), tag=tags)
    def post(self, source, tag):
        self.count += 1
        receive = Receive(source, tag, self.count)
        fitting = [message for message in self.messages if receive.takes(message)]
        assert self.mailbox.post(receive) is (fitting[0] if fitting else None)
        self.messages.remove(fitting[0]) if fitting else self.receives.append(receive)

    @rule(pick=st.integers(0, 9))
    def withdraw(self, pick):
        if self.receives:
            assert self.mailbox.withdraw(self.receives.pop(pick % len(self.receives)))

    @rule(source=sources)
    def die(self, source):
        gone = [receive for receive in self.receives if receive.source == source]
        assert sorted(receive.handle for receive in self.mailbox.withdraw_from(source)) == [
            receive.handle for receive in gone
        ]
        self.receives = [receive for receive in self.receives if receive not in gone]

    @invariant()
    def nothing_is_lost_and_nothing_is_left(self):
        assert sorted(receive.handle for receive in self.mailbox.receives()) == [
            receive.handle for receive in self.receives
        ]
        for source in SOURCES:
            waiting = [message for message in self.messages if message.source == source]
            assert self.mailbox.size_from(source, "1") == 10 * len(waiting)
            assert self.mailbox.is_waiting_for(source) == any(
                receive.takes(Message(source, "1", receive.tag, 0, 0)) for receive in self.receives
            )
        if not self.messages and not self.receives:
            assert not self.mailbox._messages
            assert not self.mailbox._receives


TestMailbox = MailboxMachine.TestCase


def test_a_message_that_was_put_back_is_the_next_one():
    mailbox: Mailbox = Mailbox()
    for number in (1, 2):
        mailbox.deliver(Message("a:0", "1", None, number, 1))
    first = mailbox.post(Receive("a:0", None, "first"))
    mailbox.deliver(first)
    assert [mailbox.post(Receive("a:0", None, "again")).content for _ in range(2)] == [1, 2]
    mailbox.post(Receive("a:0", None, "it waits"))
    given = Message("a:0", "1", None, 3, 1)
    assert mailbox.deliver(given).handle == "it waits"
    mailbox.deliver(Message("a:0", "1", None, 4, 1))
    mailbox.deliver(given)
    assert [mailbox.post(Receive("a:0", None, "again")).content for _ in range(2)] == [3, 4]


def test_a_message_that_was_put_back_goes_to_the_receive_that_waits():
    mailbox: Mailbox = Mailbox()
    message = Message("a:0", "1", None, 1, 1)
    mailbox.post(Receive("a:0", None, "first"))
    assert mailbox.deliver(message).handle == "first"
    mailbox.post(Receive("a:0", None, "second"))
    assert mailbox.deliver(message).handle == "second"
    assert not list(mailbox.receives())


def test_a_receive_from_a_group_does_not_take_what_groups_of_its_members_send():
    mailbox: Mailbox = Mailbox()
    mailbox.post(Receive("actor:*", None, "group"))
    assert mailbox.deliver(Message("actor:0:helper:2", "1", None, 1, 1)) is None
    assert not mailbox.is_waiting_for("actor:0:helper:2")
    assert mailbox.deliver(Message("actor:1", "1", None, 2, 1)).handle == "group"
    assert mailbox.post(Receive("actor:0:helper:*", None, "helpers")).content == 1
