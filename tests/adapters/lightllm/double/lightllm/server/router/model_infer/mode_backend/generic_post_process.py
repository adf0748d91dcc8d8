import torch


def sample(logits, reqs, eos_id=(2,)):
    temperatures = torch.tensor([req.sampling_param.shm_param.temperature for req in reqs], dtype=torch.float32)
    greedy = torch.tensor([req.sampling_param.shm_param.top_k == 1 for req in reqs])
    logits.div_(temperatures[:, None])
    probs = torch.softmax(logits, -1)
    ids = logits.argmax(-1)
    if not greedy.all():
        ids = torch.where(greedy, ids, torch.multinomial(torch.nan_to_num(probs, nan=1.0), 1).view(-1))
    return ids, torch.log(probs.gather(1, ids[:, None])).view(-1)
