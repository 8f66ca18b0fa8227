#include "ddp/logging_data.h"

#include "nlohmann/json.hpp"

namespace ddp {
namespace {

template <typename T>
void Put(nlohmann::json& json, const char* key, const T& value) {
  json[key] = value;
}

void Put(nlohmann::json& json, const char* key, bool value) { json[key] = value ? 1 : 0; }

template <typename T>
void Put(nlohmann::json& json, const char* key, const std::optional<T>& value) {
  if (value.has_value()) Put(json, key, *value);
}

void PutModel(const DDPLoggingData& data, nlohmann::json& json) {
  Put(json, "module_name", data.module_name);
  Put(json, "backend_name", data.backend_name);
  Put(json, "dtypes", data.dtypes);
  Put(json, "world_size", data.world_size);
  Put(json, "rank", data.rank);
  Put(json, "num_parameter_tensors", data.num_parameter_tensors);
  Put(json, "total_parameter_size_bytes", data.total_parameter_size_bytes);
  Put(json, "is_multi_device_module", data.is_multi_device_module);
  Put(json, "has_sync_bn", data.has_sync_bn);
  Put(json, "join_uneven_inputs", data.join_uneven_inputs);
  Put(json, "comm_hook", data.comm_hook);
  Put(json, "reduction_strategy", data.reduction_strategy);
  Put(json, "bucket_sizes", data.bucket_sizes);
  Put(json, "has_rebuilt_buckets", data.has_rebuilt_buckets);
  Put(json, "rebuilt_bucket_sizes", data.rebuilt_bucket_sizes);
  Put(json, "rebuilt_per_bucket_param_indices", data.rebuilt_per_bucket_param_indices);
  Put(json, "prev_iteration_grad_ready_order_indices",
      data.prev_iteration_grad_ready_order_indices);
}

void PutIteration(const DDPLoggingData& data, nlohmann::json& json) {
  Put(json, "iteration", data.iteration);
  Put(json, "num_buckets_reduced", data.num_buckets_reduced);
  Put(json, "unused_parameter_size", data.unused_parameter_size);
  Put(json, "can_set_static_graph", data.can_set_static_graph);
  Put(json, "forward_compute_time", data.forward_compute_time);
  Put(json, "backward_compute_time", data.backward_compute_time);
  Put(json, "backward_comm_time", data.backward_comm_time);
  Put(json, "backward_compute_comm_overlap_time", data.backward_compute_comm_overlap_time);
  Put(json, "avg_forward_compute_time", data.avg_forward_compute_time);
  Put(json, "avg_backward_compute_time", data.avg_backward_compute_time);
  Put(json, "avg_backward_comm_time", data.avg_backward_comm_time);
  Put(json, "avg_backward_compute_comm_overlap_time", data.avg_backward_compute_comm_overlap_time);
  Put(json, "forward_compute_time_start", data.forward_compute_time_start);
  Put(json, "backward_compute_time_start", data.backward_compute_time_start);
  Put(json, "backward_comm_time_start", data.backward_comm_time_start);
  Put(json, "backward_compute_time_end", data.backward_compute_time_end);
  Put(json, "backward_comm_time_end", data.backward_comm_time_end);
  Put(json, "overlap_ratio", data.overlap_ratio);
  Put(json, "error", data.error);
  if (data.error.has_value()) Put(json, "has_error", true);
}

void PutEnvironment(const DDPLoggingData& data, nlohmann::json& json) {
  Put(json, "master_addr", data.master_addr);
  Put(json, "master_port", data.master_port);
  Put(json, "cuda_visible_devices", data.cuda_visible_devices);
  Put(json, "torch_distributed_debug", data.torch_distributed_debug);
  Put(json, "nccl_socket_ifname", data.nccl_socket_ifname);
  Put(json, "nccl_blocking_wait", data.nccl_blocking_wait);
  Put(json, "nccl_async_error_handling", data.nccl_async_error_handling);
  Put(json, "nccl_debug", data.nccl_debug);
  Put(json, "nccl_nthreads", data.nccl_nthreads);
  Put(json, "nccl_ib_timeout", data.nccl_ib_timeout);
  Put(json, "gloo_socket_ifname", data.gloo_socket_ifname);
  Put(json, "gloo_device_transport", data.gloo_device_transport);
  Put(json, "gloo_num_threads", data.gloo_num_threads);
}

void PutOptions(const DDPLoggingData& data, nlohmann::json& json) {
  Put(json, "device_ids", data.device_ids);
  Put(json, "output_device", data.output_device);
  Put(json, "bucket_cap_bytes", data.bucket_cap_bytes);
  Put(json, "broadcast_buffers", data.broadcast_buffers);
  Put(json, "find_unused_parameters", data.find_unused_parameters);
  Put(json, "gradient_as_bucket_view", data.gradient_as_bucket_view);
  Put(json, "static_graph", data.static_graph);
}

}  // namespace

std::string DDPLoggingData::to_json() const {
  nlohmann::json json = nlohmann::json::object();  // sorts its keys
  PutModel(*this, json);
  PutOptions(*this, json);
  PutIteration(*this, json);
  PutEnvironment(*this, json);
  return json.dump(/*indent=*/-1, ' ', /*ensure_ascii=*/false,
                   nlohmann::json::error_handler_t::replace);
}

}  // namespace ddp
