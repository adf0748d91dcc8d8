from types import SimpleNamespace

g_infer_context = SimpleNamespace()


class FinishStatus:
    FINISHED_STOP, FINISHED_LENGTH = 1, 2

    def __init__(self):
        self.status = 0

    def set_status(self, status):
        self.status = status

    def is_finished(self):
        return self.status != 0


class InferReq:
    def get_cur_total_len(self):
        return self.shm_req.input_len + self.cur_output_len

    def finish_if_due(self, eos_ids, output_len):
        seen = self.shm_req.shm_prompt_ids.arr[: self.shm_req.input_len + output_len].tolist()
        stopped = any(len(stop) <= output_len and seen[-len(stop) :] == stop for stop in self.stop_sequences)
        if stopped or seen[-1] in eos_ids:
            self.finish_status.set_status(FinishStatus.FINISHED_STOP)
        elif output_len >= self.sampling_param.shm_param.max_new_tokens:
            self.finish_status.set_status(FinishStatus.FINISHED_LENGTH)

    def update_mtp_accepted_token_num(self, accept_token_num):
        self.shm_req.mtp_accepted_token_num += accept_token_num

    def update_mtp_verify_token_num(self, verify_token_num):
        self.shm_req.mtp_verify_token_num += verify_token_num

    def update_mtp_verify_step_num(self, verify_step_num):
        self.shm_req.mtp_verify_step_num += verify_step_num


class InferReqUpdatePack:
    def __init__(self, req_obj, output_len):
        self.req_obj, self.output_len = req_obj, output_len

    def handle(self, next_token_id, next_token_logprob, next_token_rank, eos_ids, is_master_in_dp):
        req, at = self.req_obj, self.req_obj.shm_req.input_len + self.output_len - 1
        req.shm_req.shm_prompt_ids.arr[at] = next_token_id
        req.shm_req.shm_logprobs.arr[at] = (next_token_logprob, next_token_rank)
        if req.finish_status.is_finished():
            return
        req.finish_if_due(eos_ids, self.output_len)
        if is_master_in_dp and req.finish_status.is_finished():
            req.shm_req.finish_token_index = at
