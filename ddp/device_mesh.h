#ifndef DDP_DEVICE_MESH_H_
#define DDP_DEVICE_MESH_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ddp {

class ProcessGroup;

// The ranks of a group as an n-dimensional grid. Each line of the grid is a process group; a mesh
// has the groups of this rank's own lines, one for each dimension. For example, a model is averaged
// along one dimension and split into pieces along another.
//
//   DeviceMesh mesh = init_device_mesh(group, "cpu", {2, 4}, {"replicate", "shard"});
//   DistributedDataParallel model(net, {.device_mesh = mesh["replicate"]});
//
// Ranks are in row-major order: the last dimension changes fastest. In a mesh of 2 x 4, rank 5 is
// at (1, 1). Its line in dimension 0 has the ranks 1 and 5, its line in dimension 1 the ranks 4 to
// 7.
//
// A value; copies share the groups. Made by init_device_mesh(). Thread-compatible.
class DeviceMesh {
 public:
  int ndim() const { return static_cast<int>(shape_.size()); }
  const std::vector<int64_t>& shape() const { return shape_; }
  const std::vector<std::string>& dim_names() const { return dim_names_; }
  const std::string& device_type() const { return device_type_; }

  // Returns the number of ranks in the mesh.
  int64_t size() const;

  // Returns this rank's position, one number per dimension.
  const std::vector<int64_t>& coordinate() const { return coordinate_; }

  // Returns the group of this rank's line in a dimension, by number or by name. Throws
  // ConfigurationError when there is no such dimension.
  const std::shared_ptr<ProcessGroup>& get_group(int dim = 0) const;
  const std::shared_ptr<ProcessGroup>& get_group(const std::string& dim_name) const;

  // Returns this rank's line in a dimension as a one-dimensional mesh. Throws as get_group() does.
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

// Makes a mesh of the ranks of `group`. Collective: all ranks call it with equal arguments. In a
// mesh of more than one dimension, every line makes new connections (ProcessGroup::new_group); a
// failure in one line is not a failure of the others. A mesh of one dimension uses `group` itself.
//
// `device_type` is the type of the group's device: "cpu" or "cuda". Throws ConfigurationError when
// the group has another device type, the extents do not multiply to the group's size, or names are
// missing or repeated. Throws what new_group() throws.
DeviceMesh init_device_mesh(const std::shared_ptr<ProcessGroup>& group,
                            const std::string& device_type, std::vector<int64_t> shape,
                            std::vector<std::string> dim_names = {});

}  // namespace ddp

#endif  // DDP_DEVICE_MESH_H_
