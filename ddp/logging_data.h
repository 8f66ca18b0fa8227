#ifndef DDP_LOGGING_DATA_H_
#define DDP_LOGGING_DATA_H_

#include <cstdint>
#include <optional>
#include <string>

namespace ddp {

// Properties and timings of a DistributedDataParallel model, for logs and monitoring. Fields have
// the names and meanings of PyTorch's _get_ddp_logging_data(). to_json() also has its format: lists
// as text, flags as 0 and 1. A value; thread-compatible.
struct DDPLoggingData {
  // --- The model and the options.
  std::string module_name;   // the module's class
  std::string backend_name;  // "shm", "gloo", "nccl"
  std::string dtypes;        // of the parameters, "double, float"
  std::string device_ids;    // "0"; empty on the CPU
  int64_t output_device = -1;
  int64_t world_size = 0;
  int64_t rank = 0;
  int64_t num_parameter_tensors = 0;       // parameters whose gradients are reduced
  int64_t total_parameter_size_bytes = 0;  // of the same parameters
  int64_t bucket_cap_bytes = 0;
  bool is_multi_device_module = false;
  bool broadcast_buffers = false;
  bool has_sync_bn = false;
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = false;
  bool static_graph = false;
  bool join_uneven_inputs = false;       // true when the model has been under a Join
  std::optional<std::string> comm_hook;  // its name; absent: none registered

  // --- The buckets, in the order of reduction. Lists as PyTorch writes them: "1024, 512" for
  // sizes in bytes, "5 4, 3 2 1 0" for the parameters of each bucket.
  std::string reduction_strategy;  // "flat buckets", or "in place: 2 gradients where they lie, ..."
  std::string bucket_sizes;        // as first assigned
  bool has_rebuilt_buckets = false;
  std::string rebuilt_bucket_sizes;
  std::string rebuilt_per_bucket_param_indices;
  std::string prev_iteration_grad_ready_order_indices;  // "5, 4, 3, 2, 1, 0"

  // --- The newest sampled iteration, and means over all samples. Nanoseconds; 0 before the first.
  // forward_compute_time: from the start of the forward to its end. backward_compute_time: from the
  // end of the forward to the last gradient. backward_comm_time: from the first bucket sent to the
  // last received. Fields with _start or _end are points in time of the monotonic clock.
  int64_t iteration = 0;  // synchronized forwards so far
  int64_t num_buckets_reduced = 0;
  int64_t unused_parameter_size = 0;  // bytes of the parameters that no rank used
  // With find_unused_parameters: true while the set of unused parameters has never changed, so that
  // static_graph would be possible.
  std::optional<bool> can_set_static_graph;
  int64_t forward_compute_time = 0;
  int64_t backward_compute_time = 0;
  int64_t backward_comm_time = 0;
  int64_t backward_compute_comm_overlap_time = 0;
  int64_t avg_forward_compute_time = 0;
  int64_t avg_backward_compute_time = 0;
  int64_t avg_backward_comm_time = 0;
  int64_t avg_backward_compute_comm_overlap_time = 0;
  int64_t forward_compute_time_start = 0;
  int64_t backward_compute_time_start = 0;
  int64_t backward_comm_time_start = 0;
  int64_t backward_compute_time_end = 0;
  int64_t backward_comm_time_end = 0;
  // The part of the communication time that overlaps the backward, over all samples, from 0 to 1.
  // Not in PyTorch.
  double overlap_ratio = 0;

  // --- The environment: "N/A" for a variable that is unset.
  std::string master_addr;
  std::string master_port;
  std::string cuda_visible_devices;
  std::string torch_distributed_debug;
  // Present only with the backend of that name.
  std::optional<std::string> nccl_socket_ifname;
  std::optional<std::string> nccl_blocking_wait;
  std::optional<std::string> nccl_async_error_handling;
  std::optional<std::string> nccl_debug;
  std::optional<std::string> nccl_nthreads;
  std::optional<std::string> nccl_ib_timeout;
  std::optional<std::string> gloo_socket_ifname;
  std::optional<std::string> gloo_device_transport;
  std::optional<int64_t> gloo_num_threads;  // never set by the library; only PyTorch's DDP sets it

  // The text of the last error of the reduction. In JSON also as has_error, which is absent without
  // one.
  std::optional<std::string> error;

  // Returns one JSON object on one line, with keys in alphabetical order, so that texts can be
  // compared. Absent fields have no key. Bytes that are not UTF-8 are replaced.
  std::string to_json() const;
};

}  // namespace ddp

#endif  // DDP_LOGGING_DATA_H_
