"""Access: identities, their credentials, their permissions and limits, and the audit log (rules A1 to A8).

model          the access file as values: identities, peers, roles, grants
file           reads the access file
needs          one table: the need of each RPC
permissions    decides: identity, action and topic in, decision out
credentials    finds the identity of a call: certificate, token, JWT
failures       bounds the cost of failed attempts
tally          tells a flood as a number
authorizer     admits each call, or refuses it; owns the sessions
topic_cells    the cells of the topics of a call
caller         the topics that a handler may reach, with the rows and fields that are granted
audit          writes the audit log

    [1]  Deny by default: without a grant that allows an action, it is refused.
    [2]  A deny beats every allow.
    [3]  A handler gets a topic only from its `Caller`, which has decided before it looks whether the topic exists.
"""
