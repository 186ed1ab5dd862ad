"""`roost demo`: a real training run on a cluster that it starts on this machine, small enough for two cores.

learning   pure: the policy and how it learns, in numpy
workers    the three roles: Env, Rollout and Actor, which is what a job of your own would have
jobs       the two modes as jobs: who sits where
training   one run: launch, play, learn, hand out weights, restart who dies
timeline   who did what when
pictures   the return curve and the timeline, as text and as SVG
display    what is shown while it goes on
show       from the command to the summary
"""
