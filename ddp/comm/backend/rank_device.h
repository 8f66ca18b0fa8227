// Free of LibTorch.
#ifndef DDP_COMM_BACKEND_RANK_DEVICE_H_
#define DDP_COMM_BACKEND_RANK_DEVICE_H_

namespace ddp::internal {

// Returns the number of this rank's device among the `visible` ones, which the process counts from
// 0: the rank with number `local_rank` on its host takes that device. A process that sees fewer
// devices (Slurm's --gpus-per-task=1 and container runtimes show each rank its own one, as number
// 0) takes `local_rank` modulo `visible`. Returns `local_rank` when `visible` is 0.
constexpr int RankDevice(int local_rank, int visible) {
  return visible > 0 ? local_rank % visible : local_rank;
}

}  // namespace ddp::internal

#endif  // DDP_COMM_BACKEND_RANK_DEVICE_H_
