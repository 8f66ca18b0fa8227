// Opaque declarations: LibTorch carries Gloo without its headers.
#ifndef DDP_THIRD_PARTY_GLOO_TRANSPORT_DEVICE_H_
#define DDP_THIRD_PARTY_GLOO_TRANSPORT_DEVICE_H_

namespace gloo::transport {
class Device;
class UnboundBuffer;
}  // namespace gloo::transport

#endif  // DDP_THIRD_PARTY_GLOO_TRANSPORT_DEVICE_H_
