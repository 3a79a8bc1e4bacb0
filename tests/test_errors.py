from rlx.errors import did_you_mean


def test_names_that_look_alike_come_first_and_the_rest_where_there_is_none():
    known = ["num_cpus", "num_gpus", "address"]
    assert did_you_mean("num_cpu", known, "remove it") == "did you mean num_cpus?"
    assert did_you_mean("num_cpu", known, "remove it", most=3) == "did you mean num_cpus or num_gpus?"
    assert did_you_mean("xyz", known, "remove it") == "remove it"
