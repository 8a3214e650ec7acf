"""Reader processes: they answer long queries, so that these do not hold up the writes of the server's process.

messages    what the server and its reader processes say to each other
process     a reader process
pool        the server's side: starts the processes and gives them work

    [1]  A reader process follows the database (`engine/following`) and writes nothing. Losing one loses no data.
    [2]  A cut counts only if the topic is still read in the same way once the cut is open. Otherwise the server's
         process answers.
    [3]  A reader process sends a piece only when it is asked to, and the server asks for two ahead at most. So a client
         that does not read holds up nobody else, and little memory.
    [4]  A reader process ends when its connection does, also if the server is killed.
"""
