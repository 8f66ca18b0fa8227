#include "ddp/device_mesh.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ddp/common/error.h"
#include "ddp/process_group.h"

namespace ddp {
namespace {

void Check(const ProcessGroup& group, const std::string& device_type,
           const std::vector<int64_t>& shape, const std::vector<std::string>& dim_names) {
  const std::string of_group = c10::DeviceTypeName(group.device().type(), /*lower_case=*/true);
  if (device_type != of_group) {
    throw ConfigurationError(absl::StrCat("rank ", group.rank(), ": a device mesh of type \"",
                                          device_type, "\" does not fit a process group that ",
                                          "works on ", of_group, " (", group.backend(), ")"));
  }
  int64_t product = 1;
  bool positive = !shape.empty();
  for (const int64_t extent : shape) {
    positive = positive && extent > 0;
    product *= std::clamp<int64_t>(extent, 0, group.size() + 1);  // cannot overflow for long
    product = std::min<int64_t>(product, group.size() + 1);
  }
  if (!positive || product != group.size()) {
    throw ConfigurationError(absl::StrCat(
        "rank ", group.rank(), ": a device mesh of shape [", absl::StrJoin(shape, ", "),
        "] does not fit a group of ", group.size(), " ranks: its extents must multiply to that"));
  }
  if (dim_names.empty()) return;
  const std::set<std::string> different(dim_names.begin(), dim_names.end());
  if (dim_names.size() != shape.size() || different.size() != shape.size()) {
    throw ConfigurationError(absl::StrCat("rank ", group.rank(), ": a device mesh of ",
                                          shape.size(), " dimensions needs as many different ",
                                          "names, not [", absl::StrJoin(dim_names, ", "), "]"));
  }
}

}  // namespace

int64_t DeviceMesh::size() const {
  int64_t ranks = 1;
  for (const int64_t extent : shape_) ranks *= extent;
  return ranks;
}

const std::shared_ptr<ProcessGroup>& DeviceMesh::get_group(int dim) const {
  if (dim < 0 || dim >= ndim()) {
    throw ConfigurationError(
        absl::StrCat("a device mesh of ", ndim(), " dimensions has no dimension ", dim));
  }
  return groups_[dim];
}

int DeviceMesh::FindDimension(const std::string& dim_name) const {
  const auto found = std::find(dim_names_.begin(), dim_names_.end(), dim_name);
  if (found == dim_names_.end()) {
    throw ConfigurationError(absl::StrCat("the device mesh has no dimension \"", dim_name,
                                          "\"; it has [", absl::StrJoin(dim_names_, ", "), "]"));
  }
  return static_cast<int>(found - dim_names_.begin());
}

const std::shared_ptr<ProcessGroup>& DeviceMesh::get_group(const std::string& dim_name) const {
  return groups_[FindDimension(dim_name)];
}

DeviceMesh DeviceMesh::operator[](const std::string& dim_name) const {
  const int dim = FindDimension(dim_name);
  DeviceMesh line;
  line.device_type_ = device_type_;
  line.shape_ = {shape_[dim]};
  line.dim_names_ = {dim_name};
  line.coordinate_ = {coordinate_[dim]};
  line.groups_ = {groups_[dim]};
  return line;
}

DeviceMesh init_device_mesh(const std::shared_ptr<ProcessGroup>& group,
                            const std::string& device_type, std::vector<int64_t> shape,
                            std::vector<std::string> dim_names) {
  if (!group) throw ConfigurationError("a device mesh needs a process group");
  Check(*group, device_type, shape, dim_names);
  DeviceMesh mesh;
  mesh.device_type_ = device_type;
  mesh.shape_ = std::move(shape);
  mesh.dim_names_ = std::move(dim_names);
  mesh.coordinate_.resize(mesh.shape_.size());
  mesh.groups_.resize(mesh.shape_.size());
  int64_t stride = group->size();  // between neighbours in the dimension
  for (int dim = 0; dim < mesh.ndim(); ++dim) {
    const int64_t extent = mesh.shape_[dim];
    stride /= extent;
    mesh.coordinate_[dim] = group->rank() / stride % extent;
    if (mesh.ndim() == 1) {
      mesh.groups_[dim] = group;
      break;
    }
    std::vector<int> line;
    const int64_t first = group->rank() - mesh.coordinate_[dim] * stride;
    for (int64_t i = 0; i < extent; ++i) line.push_back(static_cast<int>(first + i * stride));
    mesh.groups_[dim] = group->new_group(line);
  }
  return mesh;
}

}  // namespace ddp
