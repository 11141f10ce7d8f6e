"""How the ranks of a job meet, from the outside in.

    meeting.py        what init calls: who leads, who follows; the protocol within a host
    leader.py         the side of a host's local rank 0
    follower.py       the side of its other ranks
    latecomers.py     those who come when all is over
    server.py         where the leaders of several hosts meet; the protocol between hosts
    attempt.py        one attempt of theirs
    server_line.py    a leader's connection to it
    hosting.py        the server in a thread, where there is no launcher
    tree.py           how the table reaches all hosts
    mesh.py           connections between ranks of different hosts
    rank.py           what a rank is at a meeting
    table.py          what hosts say -> the table of all ranks, or their contradiction
    wiring.py         what the engine gets in the end
    door.py           the listening side of every connection
    gate.py           how many may wait there
    refusals.py       telling who was turned away
    caller.py         its connecting side
    connection.py     frames and exact reads in a loop
    descriptors.py    descriptors over a Unix socket
    addresses.py      where this machine listens
    proof.py          challenge and response
    encryption.py     which connections are encrypted
    messages.py       what is said, as bytes
    encoding.py       numbers, texts and lists as bytes
    loop.py           one selector and a clock
    times.py          how long what is waited for

The server needs of the engine only what encrypts its connections, and that when it is opened: the launcher imports it
without loading the extension.
"""
