import torch


def test_a_tensor_is_gathered_whole_however_its_rows_divide(two_ranks):
    for tensors, gathered in two_ranks("engine", "gathered", [(1,), (3,), (4, 2), (5, 3, 2)]):
        for tensor, found in zip(tensors, gathered, strict=True):
            assert all(torch.equal(each, tensor) for each in found)


def test_on_the_cpu_weights_are_not_gathered_by_the_operation_that_crashes_gloo(model_folder, two_ranks):
    for names in two_ranks("engine", "operations_of_the_stream", model_folder):
        assert any("c10d::allgather" in name for name in names)
        assert not [name for name in names if name.startswith("_c10d_functional")]
