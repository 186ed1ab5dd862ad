"""`roost xray`: who is where on any Ray cluster, and what its jobs wait for, without changing anything there.

facts    what was seen of a cluster, values only, and hiding the secrets in all of it
gather   reads it: the one module that talks to Ray; it connects no driver, and starts and leaves nothing
names    pure: what actors are called in pictures, and the roles of the classes of known frameworks
waits    pure: why a bundle, an actor or a task cannot be placed, and who has what it lacks
stacks   pure: where processes stand, from the text of py-spy
judge    pure: facts -> findings
show     pure: facts and findings -> text, a page, and the files of a report
"""
