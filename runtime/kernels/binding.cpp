// Plan records become kernel arguments: the table of kernels and what each one's operands mean.
//
// compiler/targets/cpu/kernel_table.py states the same table; plan_signatures() lets the loader
// compare the two.
#include <algorithm>

#include "executor.h"

namespace ropeway {
namespace {

enum Kernel : int32_t {
    kEmbedding, kRmsNorm, kLayerNorm, kGemm, kGlu, kRope, kKvWrite, kAttention, kGatherRows, kUnary,
    kBinary, kReduce, kSoftmax, kGemmGlu
};

bool present(const RefRecord& ref) { return ref.space >= 0; }

int64_t width_of(const RefRecord& ref) {
    int64_t width = 1;
    for (int i = 0; i < ref.dims; ++i) width *= ref.shape[i];
    return width;
}

RmsNormArgs norm_of(const double* floats) {
    RmsNormArgs args;
    args.eps = static_cast<float>(floats[0]);
    args.offset = static_cast<float>(floats[1]);
    return args;
}

}  // namespace

const char* plan_signatures() {
    return "embedding(ids,table,y;;)\n"
           "rms_norm(x,residual?,gain?,sum?,y;;eps,offset)\n"
           "layer_norm(x,gain?,bias?,y;;eps)\n"
           "gemm(x,weight,bias?,add?,residual?,gain?,sum?,y;norm;eps,offset)\n"
           "glu(x,y;act;)\n"
           "rope(q,k?,positions,table,q_out,k_out?;rotary_dim,interleaved;)\n"
           "kv_write(k,v,cache,slots;;)\n"
           "attention(q,cache,block_table,query_start,lengths,y;window;scale,softcap)\n"
           "gather_rows(x,index,y;;)\n"
           "unary(x,y;op;)\n"
           "binary(a,b?,y;op;scalar)\n"
           "reduce(x,y;reduced,op;)\n"
           "softmax(x,y;;)\n"
           "gemm_glu(x,weight,bias?,residual?,gain?,sum?,y;norm,act;eps,offset)";
}

const void* Program::weight(const RefRecord& ref) const {
    return present(ref) ? weights_[static_cast<size_t>(ref.index)].data : nullptr;
}

View Program::view(const RefRecord& ref, const int64_t* offsets) const {
    View view;
    if (!present(ref)) return view;
    view.dtype = static_cast<DType>(ref.dtype);
    view.data = arena_ + offsets[ref.index] + ref.offset;
    view.stride = row_bytes_[static_cast<size_t>(ref.index)] / item_size(view.dtype);
    return view;
}

Strided Program::strided(const RefRecord& ref, const int64_t* offsets) const {
    Strided strided;
    if (!present(ref)) return strided;
    if (static_cast<Space>(ref.space) == Space::weights) {
        // Only ever read: the plan check lets no result lie in a weight.
        strided.data = static_cast<char*>(const_cast<void*>(weight(ref))) + ref.offset;
        strided.dtype = static_cast<DType>(ref.dtype);
        strided.stride[0] = 0;
    } else {
        const View rows = view(ref, offsets);
        strided.data = rows.data;
        strided.dtype = rows.dtype;
        strided.stride[0] = rows.stride;
    }
    std::copy_n(ref.stride, ref.dims, strided.stride + 1);
    return strided;
}

void Program::fill_shape(const RefRecord& ref, int64_t* shape, int32_t* dims) const {
    *dims = ref.dims + 1;
    shape[0] = 0;  // the true row count, set when the step runs
    std::copy_n(ref.shape, ref.dims, shape + 1);
}

// x, weight and bias come first; residual, gain, sum and y from operand `rest` on.
NormGemm Program::product(const StepRecord& record, const int64_t* offsets, int rest) const {
    const RefRecord* refs = record.refs;
    NormGemm args;
    args.gemm.k = width_of(refs[0]);
    args.gemm.x = view(refs[0], offsets);
    args.gemm.weight = weight(refs[1]);
    args.gemm.bias = weight(refs[2]);
    args.gemm.y = view(refs[rest + 3], offsets);
    args.normed = record.ints[0] != 0;
    if (!args.normed) return args;
    args.norm = norm_of(record.floats);
    args.norm.width = args.gemm.k;
    args.norm.x = args.gemm.x;
    args.norm.residual = view(refs[rest], offsets);
    args.norm.gain = weight(refs[rest + 1]);
    args.norm.sum = view(refs[rest + 2], offsets);
    return args;
}

BoundStep Program::bind(const StepRecord& record, const int64_t* offsets) const {
    BoundStep step;
    step.rows = static_cast<RowKind>(record.rows);
    const RefRecord* refs = record.refs;
    const auto at = [&](int operand) { return view(refs[operand], offsets); };
    switch (record.kernel) {
        case kEmbedding: {
            const WeightRecord& table = weights_[static_cast<size_t>(refs[1].index)];
            EmbeddingArgs args;
            args.width = table.width;
            args.vocab = table.rows;
            args.packed = table.packed != 0;
            args.table.data = const_cast<void*>(table.data);
            args.table.stride = table.width;
            args.table.dtype = static_cast<DType>(table.dtype);
            args.y = at(2);
            step.index = static_cast<Role>(refs[0].index);
            step.arguments = args;
            break;
        }
        case kRmsNorm: {
            RmsNormArgs args = norm_of(record.floats);
            args.width = refs[0].shape[refs[0].dims - 1];
            args.heads = width_of(refs[0]) / args.width;
            args.x = at(0);
            args.residual = at(1);
            args.gain = weight(refs[2]);
            args.sum = at(3);
            args.y = at(4);
            step.arguments = args;
            break;
        }
        case kLayerNorm: {
            LayerNormArgs args;
            args.width = refs[0].shape[refs[0].dims - 1];
            args.heads = width_of(refs[0]) / args.width;
            args.x = at(0);
            args.gain = weight(refs[1]);
            args.bias = weight(refs[2]);
            args.y = at(3);
            args.eps = static_cast<float>(record.floats[0]);
            step.arguments = args;
            break;
        }
        case kGemm: {
            NormGemm args = product(record, offsets, 4);
            args.gemm.add = at(3);
            args.gemm.n = width_of(refs[7]);
            step.arguments = args;
            break;
        }
        case kGemmGlu: {
            NormGemm args = product(record, offsets, 3);
            args.gemm.n = 2 * width_of(refs[6]);
            args.gemm.epilogue = static_cast<Epilogue>(1 + record.ints[1]);
            step.arguments = args;
            break;
        }
        case kGlu: {
            GluArgs args;
            args.x = at(0);
            args.y = at(1);
            args.width = width_of(refs[1]);
            args.act = static_cast<Activation>(record.ints[0]);
            step.arguments = args;
            break;
        }
        case kRope: {
            const WeightRecord& table = weights_[static_cast<size_t>(refs[3].index)];
            RopeArgs args;
            args.q_heads = static_cast<int32_t>(refs[0].shape[0]);
            args.head_dim = static_cast<int32_t>(refs[0].shape[1]);
            args.k_heads = present(refs[1]) ? static_cast<int32_t>(refs[1].shape[0]) : 0;
            args.rotary_dim = static_cast<int32_t>(record.ints[0]);
            args.interleaved = record.ints[1] != 0;
            args.q = at(0);
            args.k = at(1);
            args.q_out = at(4);
            args.k_out = at(5);
            args.table = static_cast<const float*>(table.data);
            args.table_stride = table.width;
            step.arguments = args;
            break;
        }
        case kKvWrite: {
            const CacheRecord& cache = caches_[static_cast<size_t>(refs[2].index)];
            KvWriteArgs args;
            args.kv_heads = cache.heads;
            args.head_dim = cache.key_dim;
            args.v_head_dim = cache.value_dim;
            args.dtype = static_cast<DType>(cache.dtype);
            args.k = at(0);
            args.v = at(1);
            step.cache = refs[2].index;
            step.group = cache.group;
            step.arguments = args;
            break;
        }
        case kAttention: {
            const CacheRecord& cache = caches_[static_cast<size_t>(refs[1].index)];
            AttentionArgs args;
            args.heads = static_cast<int32_t>(refs[0].shape[0]);
            args.kv_heads = cache.heads;
            args.head_dim = cache.key_dim;
            args.v_head_dim = cache.value_dim;
            args.dtype = static_cast<DType>(cache.dtype);
            args.window = static_cast<int32_t>(record.ints[0]);
            args.scale = static_cast<float>(record.floats[0]);
            args.softcap = static_cast<float>(record.floats[1]);
            args.q = at(0);
            args.y = at(5);
            step.cache = refs[1].index;
            step.group = cache.group;
            step.arguments = args;
            break;
        }
        case kGatherRows: {
            GatherRowsArgs args;
            args.x = at(0);
            args.y = at(2);
            args.width = width_of(refs[2]);
            step.arguments = args;
            break;
        }
        case kUnary: {
            UnaryArgs args;
            fill_shape(refs[1], args.shape, &args.dims);
            args.x = strided(refs[0], offsets);
            args.y = strided(refs[1], offsets);
            args.op = static_cast<UnaryOp>(record.ints[0]);
            step.arguments = args;
            break;
        }
        case kBinary: {
            BinaryArgs args;
            fill_shape(refs[2], args.shape, &args.dims);
            args.a = strided(refs[0], offsets);
            args.b = strided(refs[1], offsets);
            args.y = strided(refs[2], offsets);
            args.scalar = static_cast<float>(record.floats[0]);
            args.op = static_cast<BinaryOp>(record.ints[0]);
            step.arguments = args;
            break;
        }
        case kReduce: {
            ReduceArgs args;
            fill_shape(refs[0], args.shape, &args.dims);
            args.reduced = static_cast<int32_t>(record.ints[0]);
            args.dims -= args.reduced;
            args.x = strided(refs[0], offsets);
            args.y = strided(refs[1], offsets);
            args.op = static_cast<ReduceOp>(record.ints[1]);
            step.arguments = args;
            break;
        }
        default: {
            SoftmaxArgs args;
            fill_shape(refs[0], args.shape, &args.dims);
            args.x = strided(refs[0], offsets);
            args.y = strided(refs[1], offsets);
            step.arguments = args;
            break;
        }
    }
    return step;
}

}  // namespace ropeway
