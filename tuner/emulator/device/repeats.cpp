// Runs operators that Python has judged once, without Python (inside/core.py).
//
// PyTorch calls `PyInterpreterVTable::dispatch` for each operator that reaches a Python mode. That
// entry is replaced. Where the emulator's mode is the only one, a view goes straight to its kernel,
// and so does a call whose arguments have the layouts of an earlier one that was found to settle no
// values. Its price is counted here. All other calls go on to the mode.

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/utils/torch_dispatch_mode.h>
#if __has_include(<torch/headeronly/version.h>)
#include <torch/headeronly/version.h>
#endif

#include <sys/mman.h>
#include <unistd.h>

#include <mutex>
#include <unordered_map>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

// Of Python, whose headers need not be there.
extern "C" {
void* PyGILState_GetThisThreadState(void);
int PyGILState_Ensure(void);
void PyGILState_Release(int held);
void* PyEval_GetFrame(void);
void* PyFrame_GetCode(void* frame);
void* PyObject_GetAttrString(void* object, const char* name);
int PyUnicode_CompareWithASCIIString(void* text, const char* other);
void Py_DecRef(void* object);
}

extern "C" void emu_work(double host_ns, double device_ns);
extern "C" uint64_t emu_launch_count(void);

// `Shared` of inside/core.py.
struct Shared {
  int64_t seen;         // launches that are accounted for
  int8_t on;            // calls may be counted here
  int8_t in_backward;   // the backward pass runs
  int8_t recomputing;   // a checkpoint runs its forward pass again
  int8_t host;          // launches take time of the host
  int8_t watched;       // the mode has to see all calls but views
  double recomputed;    // times that a recomputed call takes of the host
};
extern "C" {
__attribute__((visibility("default"))) Shared tuner_shared;
}

namespace {

using c10::impl::PyInterpreterVTable;
using c10::impl::TorchDispatchModeTLS;
using torch::jit::Stack;
using Dispatch = void (*)(const PyInterpreterVTable*, const c10::OperatorHandle&, Stack*);

using Key = std::vector<int64_t>;
struct Hash {
  size_t operator()(const Key& key) const {
    uint64_t hash = key.size();
    for (int64_t one : key) hash = (hash ^ static_cast<uint64_t>(one)) * 0x9E3779B97F4A7C15u ^ hash >> 29;
    return hash;
  }
};

enum Kind { MODE = 0, NOTHING = 1, COUNTED = 2 };
struct Judged {
  int kind;
  int64_t number;
  double host_ns, device_ns;
};

enum State { UNKNOWN = 0, VIEW = 1, KEYED = 2, LEFT = 3 };
struct Operator {
  State state = UNKNOWN;
  std::unordered_map<Key, Judged, Hash> calls;
};

// A call that the mode is about to judge.
struct Frame {
  Operator* known;
  Key key;
};
thread_local Frame* current = nullptr;
struct Within {
  Frame* outer = current;
  explicit Within(Frame* frame) { current = frame; }
  ~Within() { current = outer; }
};

std::mutex lock;
std::unordered_map<const void*, Operator> operators;  // by the address of an operator's name
std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> noted;
size_t noted_at_most = 1024;
std::vector<int64_t> counts[2];

PyObject* ours = nullptr;
const c10::impl::PyInterpreter* interpreter = nullptr;
Dispatch original = nullptr;

bool add(Key& key, const at::Tensor& tensor) {
  if (!tensor.defined()) return key.push_back(-1), true;
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {  // Python's number
    auto type = tensor.scalar_type();
    if (!tensor.is_cpu() || (type != at::kDouble && type != at::kLong)) return false;
    key.push_back(-3 - static_cast<int64_t>(type));
    if (type == at::kLong) key.push_back(*static_cast<const int64_t*>(tensor.const_data_ptr()));
    return true;
  }
  auto keys = tensor.key_set();
  if (keys.has(c10::DispatchKey::Python) || !keys.has(c10::DispatchKey::CUDA)) return false;
  key.push_back(static_cast<int64_t>(tensor.scalar_type()) << 32 | tensor.device().index() << 16 |
                tensor.dim() << 1 | (noted.count(tensor.storage().unsafeGetStorageImpl()) != 0));
  key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
  key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
  return true;
}

// Adds what decides the price of a call; false for arguments that the mode has to see.
bool add(Key& key, const c10::IValue& value) {
  if (value.isTensor()) return add(key, value.toTensor());
  key.push_back(-2 - static_cast<int64_t>(value.isInt()) - 2 * value.isBool() - 4 * value.isNone() -
                8 * value.isDouble() - 16 * value.isList() - 32 * value.isDevice() -
                64 * value.isString());
  if (value.isInt()) return key.push_back(value.toInt()), true;
  if (value.isBool()) return key.push_back(value.toBool()), true;
  if (value.isString()) {
    key.push_back(static_cast<int64_t>(value.toStringRef().size()));
    for (char one : value.toStringRef()) key.push_back(one);
    return true;
  }
  if (value.isDevice()) {
    key.push_back(static_cast<int64_t>(value.toDevice().type()) << 8 | value.toDevice().index());
    return true;
  }
  if (value.isList()) {
    auto list = value.toListRef();
    key.push_back(static_cast<int64_t>(list.size()));
    for (const auto& one : list)
      if (!add(key, one)) return false;
    return true;
  }
  return value.isNone() || value.isDouble();
}

bool has_subclass(const c10::IValue& value) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    return tensor.defined() && tensor.key_set().has(c10::DispatchKey::Python);
  }
  if (!value.isList()) return false;
  for (const auto& one : value.toListRef())
    if (has_subclass(one)) return true;
  return false;
}

bool is_ours() {
  return TorchDispatchModeTLS::stack_len() == 1 &&
         TorchDispatchModeTLS::get_stack_at(0)->ptr(interpreter) == ours;
}

void call(const c10::OperatorHandle& op, Stack* stack) {
  torch::torch_dispatch_mode::StashTorchDispatchModeGuard without_mode;
  op.callBoxed(stack);
}

void count(const Judged& judged) {
  bool again = tuner_shared.recomputing || (tuner_shared.in_backward && c10::GradMode::is_enabled());
  {
    std::lock_guard<std::mutex> held(lock);
    auto& numbers = counts[again];
    if (numbers.size() <= static_cast<size_t>(judged.number)) numbers.resize(judged.number + 256);
    numbers[judged.number]++;
  }
  double host_ns = tuner_shared.host ? judged.host_ns : 0.0;
  emu_work(again ? host_ns * tuner_shared.recomputed : host_ns, judged.device_ns);
}

void run(const c10::OperatorHandle& op, Stack* stack, const Judged& judged) {
  try {
    call(op, stack);
  } catch (...) {
    tuner_shared.seen = static_cast<int64_t>(emu_launch_count());
    throw;
  }
  if (judged.kind == COUNTED) count(judged);
  tuner_shared.seen = static_cast<int64_t>(emu_launch_count());
}

#if defined(TORCH_VERSION_MINOR) && (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13)
// True if no Python but the call of the engine is on this thread's stack.
bool is_engines() {
  if (!PyGILState_GetThisThreadState()) return true;
  int held = PyGILState_Ensure();
  void* frame = PyEval_GetFrame();
  bool found = !frame;
  if (frame) {
    void* code = PyFrame_GetCode(frame);
    void* name = PyObject_GetAttrString(code, "co_name");
    found = PyUnicode_CompareWithASCIIString(name, "_engine_run_backward") == 0;
    Py_DecRef(name);
    Py_DecRef(code);
  }
  PyGILState_Release(held);
  return found;
}

// True if autograd adds two gradients of which nobody else holds the first. Without a mode it adds
// in place then; under one a gradient that Python has seen counts as held (InputBuffer::accumulate).
bool accumulates(const c10::OperatorHandle& op, const Stack& stack) {
  static const auto add = c10::Dispatcher::singleton().findSchemaOrThrow("aten::add", "Tensor");
  if (c10::GradMode::is_enabled() || !(op == add) || !torch::autograd::get_current_node()) return false;
  const auto arguments = torch::jit::last(stack, 3);
  const auto &sum = arguments[0].toTensor(), &gradient = arguments[1].toTensor();
  if (!sum.is_cuda() || !gradient.is_cuda() || sum.layout() != at::kStrided ||
      gradient.layout() != at::kStrided || has_subclass(arguments[0]) || has_subclass(arguments[1]))
    return false;
  auto seen = sum.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
  auto storage = sum.storage().unsafeGetStorageImpl();
  // The engine's, the stack's, the call's, and that of Python's object; which nobody else has.
  return seen && *reinterpret_cast<const uint32_t*>(seen) == 1 && sum.use_count() == 4 &&
         sum.sizes() == gradient.sizes() && sum.scalar_type() == gradient.scalar_type() && sum.is_non_overlapping_and_dense() &&
         sum.storage().use_count() == 1 + (storage->pyobj_slot()->load_pyobj() != nullptr) &&
         is_engines();
}
#else
bool accumulates(const c10::OperatorHandle&, const Stack&) { return false; }
#endif

void dispatch(const PyInterpreterVTable* self, const c10::OperatorHandle& op, Stack* stack) {
  Frame frame{nullptr, {}};
  if (is_ours()) {  // under a mode of the program's own, autograd adds as it does there
    if (accumulates(op, *stack)) {
      static const auto in_place = c10::Dispatcher::singleton().findSchemaOrThrow("aten::add_", "Tensor");
      return dispatch(self, in_place, stack);
    }
    auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    std::unique_lock<std::mutex> held(lock);
    Operator& known = operators[&op.operator_name()];
    if (known.state == VIEW) {
      held.unlock();
      bool plain = true;
      for (const auto& one : arguments) plain = plain && !has_subclass(one);
      if (plain) return call(op, stack);
    } else if (known.state == KEYED && tuner_shared.on && !tuner_shared.watched) {
      bool plain = true;
      for (const auto& one : arguments) plain = plain && add(frame.key, one);
      auto found = plain ? known.calls.find(frame.key) : known.calls.end();
      if (found != known.calls.end()) {
        Judged judged = found->second;
        held.unlock();
        if (judged.kind != MODE && static_cast<int64_t>(emu_launch_count()) == tuner_shared.seen)
          return run(op, stack, judged);
      } else if (plain) {
        frame.known = &known;
      }
    }
  }
  Within within(frame.known ? &frame : nullptr);
  original(self, op, stack);
}

}  // namespace

// Begins, with the mode on the stack; returns 0 if PyTorch's entry cannot be replaced.
EXPORT int tuner_install(void* mode) {
  if (original || TorchDispatchModeTLS::stack_len() == 0) return 0;
  ours = static_cast<PyObject*>(mode);
  interpreter = &TorchDispatchModeTLS::get_stack_at(0)->pyinterpreter();
  // A pointer to a virtual function is one more than its place in the table (Itanium C++ ABI).
  union {
    void (PyInterpreterVTable::*function)(const c10::OperatorHandle&, Stack*) const;
    intptr_t place;
  } entry = {&PyInterpreterVTable::dispatch};
  auto table = *reinterpret_cast<char* const*>(interpreter->vtable_);
  auto slot = reinterpret_cast<Dispatch*>(table + entry.place - 1);
  intptr_t page = sysconf(_SC_PAGESIZE);
  auto start = reinterpret_cast<void*>(reinterpret_cast<intptr_t>(slot) & -page);
  if (mprotect(start, page, PROT_READ | PROT_WRITE) != 0) return 0;
  original = *slot;
  *slot = dispatch;
  mprotect(start, page, PROT_READ);
  return 1;
}

// Tells how to treat an operator; returns 0 if there is none of this name.
EXPORT int tuner_operator(const char* name, const char* overload, int state) {
  auto found = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!found) return 0;
  std::lock_guard<std::mutex> held(lock);
  operators[&found->operator_name()].state = static_cast<State>(state);
  return 1;
}

// 1 if the call that the mode runs has not been judged, and may be.
EXPORT int tuner_asks(void) { return current != nullptr; }

// Judges the call that the mode runs, for all calls with arguments of its layouts.
EXPORT void tuner_judge(int kind, int64_t number, double host_ns, double device_ns) {
  if (!current) return;
  std::lock_guard<std::mutex> held(lock);
  current->known->calls[std::move(current->key)] = {kind, number, host_ns, device_ns};
  current = nullptr;
}

// Forgets all calls that were judged.
EXPORT void tuner_forget(void) {
  std::lock_guard<std::mutex> held(lock);
  for (auto& one : operators) one.second.calls.clear();
}

// Forgets also what was counted: another pricer numbers calls anew.
EXPORT void tuner_restart(void) {
  tuner_forget();
  std::lock_guard<std::mutex> held(lock);
  for (auto& numbers : counts) numbers.clear();
}

// Notes that a storage has a note on its values, or none any more.
EXPORT void tuner_note(void* storage, int has) {
  auto impl = static_cast<c10::StorageImpl*>(storage);
  std::lock_guard<std::mutex> held(lock);
  if (!has) {
    noted.erase(impl);
    return;
  }
  // The weak pointer keeps the address from being used for another storage.
  noted.emplace(impl, c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl));
  if (noted.size() <= noted_at_most) return;
  for (auto one = noted.begin(); one != noted.end();)
    one = one->second.expired() ? noted.erase(one) : std::next(one);
  noted_at_most = 2 * noted.size() + 1024;
}

// Moves the counts of calls, `size` of them, to `into`.
EXPORT void tuner_take(int again, int64_t* into, int64_t size) {
  std::lock_guard<std::mutex> held(lock);
  auto& numbers = counts[again];
  for (int64_t i = 0; i < size; i++) {
    bool has = i < static_cast<int64_t>(numbers.size());
    into[i] = has ? numbers[i] : 0;
    if (has) numbers[i] = 0;
  }
}
