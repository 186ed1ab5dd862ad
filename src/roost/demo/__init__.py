"""`roost demo`: a real training run on a local cluster, small enough for two cores.

learning   the policy and how it learns, in numpy; pure
workers    the three roles, Env, Rollout and Actor, as a job of your own would define them
jobs       the two modes as jobs: which role goes where
training   one run: launch, let the groups play and learn, restart workers that die
rounds     the results of a run
display    the terminal during training
show       the whole demo, from the command to the summary
advice     the placement that the measured times would make the best
tasks      the two trainings to choose from, CartPole and a language model
"""
