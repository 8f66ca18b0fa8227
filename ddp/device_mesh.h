#ifndef DDP_DEVICE_MESH_H_
#define DDP_DEVICE_MESH_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ddp {

class ProcessGroup;

// The ranks of a group laid out as an n-dimensional grid, with a process group for each line of it:
// over the one dimension a model is averaged, over another it is cut to pieces, for example.
//
//   DeviceMesh mesh = init_device_mesh(group, "cpu", {2, 4}, {"replicate", "shard"});
//   DistributedDataParallel model(net, {.device_mesh = mesh["replicate"]});
//
// Ranks are laid out in order, the last dimension fastest: in a mesh of 2 x 4 rank 5 is at (1, 1).
// Its line in dimension 0 are the ranks 1 and 5, in dimension 1 the ranks 4 to 7.
//
// A value that shares its groups with its copies. Thread-compatible.
class DeviceMesh {
 public:
  int ndim() const { return static_cast<int>(shape_.size()); }
  const std::vector<int64_t>& shape() const { return shape_; }
  const std::vector<std::string>& dim_names() const { return dim_names_; }
  const std::string& device_type() const { return device_type_; }

  // The number of ranks in the mesh.
  int64_t size() const;

  // Where this rank is.
  const std::vector<int64_t>& coordinate() const { return coordinate_; }

  // The group of this rank's line in a dimension, given by number or by name. A mesh of one
  // dimension has one. Throws ConfigurationError: there is no such dimension.
  const std::shared_ptr<ProcessGroup>& get_group(int dim = 0) const;
  const std::shared_ptr<ProcessGroup>& get_group(const std::string& dim_name) const;

  // This rank's line in a dimension, as a mesh of its own. Throws as get_group() does.
  DeviceMesh operator[](const std::string& dim_name) const;

 private:
  friend DeviceMesh init_device_mesh(const std::shared_ptr<ProcessGroup>& group,
                                     const std::string& device_type, std::vector<int64_t> shape,
                                     std::vector<std::string> dim_names);
  DeviceMesh() = default;
  int FindDimension(const std::string& dim_name) const;

  std::string device_type_;
  std::vector<int64_t> shape_;
  std::vector<std::string> dim_names_;  // empty: no names
  std::vector<int64_t> coordinate_;
  std::vector<std::shared_ptr<ProcessGroup>> groups_;  // of this rank's lines, one per dimension
};

// Lays out the ranks of `group`. Collective: all ranks call it with equal arguments; every line of
// more than one dimension connects anew (ProcessGroup::new_group), and its failures are its own.
//
// `device_type` is the type of the group's device: "cpu", "cuda". Throws ConfigurationError when it
// is another one, when the shape does not multiply to the group's size, or names are missing or
// used twice; and what new_group() throws.
DeviceMesh init_device_mesh(const std::shared_ptr<ProcessGroup>& group,
                            const std::string& device_type, std::vector<int64_t> shape,
                            std::vector<std::string> dim_names = {});

}  // namespace ddp

#endif  // DDP_DEVICE_MESH_H_
