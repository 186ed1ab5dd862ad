"""`roost demo`: a real training run on a local cluster, small enough for two cores.

learning   the policy and how it learns, in numpy; pure
workers    the three roles, Env, Rollout and Actor, as a job of your own would define them
tasks      the two trainings to choose from, and their two modes as jobs: which role goes where
training   one run: launch, let the groups play and learn, restart workers that die
rounds     the results of a run
show       the whole demo on the terminal, from the command to the summary and the advice
llm        the same with a language model
"""
