// The compiled part of aiodist: the work for which numpy goes over an array several times.
//
// `differ` finds what has changed between two versions of a chunk of weights. Its reference is
// aiodist.channels.differences.
//
// `reduce` reduces arrays. aiodist.buffers.kernels is the reference, and does all others. Both give the same bits, because
// operands are combined in the order of ranks, and float16 and bfloat16 are added up in float32 and
// rounded once. (Of two NaNs this keeps the one of the lower rank. numpy does so, too, but for some
// elements at the end of an array.)
//
// Build it with -ffp-contract=off: a fused multiply-add would round differently.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define LAYOUT 2       // aiodist.compiled refuses a build with another number
#define BLOCK 1024     // elements that are worked on at once: they stay in the first cache
#define ALONE 32768    // bytes from which other threads may run meanwhile

// The same loops for wider registers, chosen when the module is loaded. Needs ifunc of glibc.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

#if defined(__GNUC__)
#define SEPARATE __attribute__((noinline))
#else
#define SEPARATE
#endif

// ---- elements: as they lie in memory, and as they are added up ----------------------------------

#define SAME(x) (x)

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float from_bfloat16(uint16_t x) { return float_of((uint32_t)x << 16); }

// To nearest, ties to even; a NaN stays a NaN, which rounding could carry over into infinity.
static inline uint16_t to_bfloat16(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    const uint32_t nan = (bits >> 16) | 0x40;
    return (uint16_t)((bits & 0x7FFFFFFF) > 0x7F800000 ? nan : rounded);
}

static inline float from_float16(uint16_t x) {
    const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7FFF;
    const uint32_t small = bits_of((float)(int32_t)rest * 0x1p-24f);  // below 2^-14, exactly
    const uint32_t large = (rest << 13) + (rest < 0x7C00 ? 112u << 23 : 224u << 23);
    return float_of(sign | (rest < 0x400 ? small : large));
}

// To nearest, ties to even. Small ones are rounded by an addition, after which the last bit counts
// 2^-24, as the last one of the smallest float16 does. (After F. Giesen, "float_to_half_fast3".)
static inline uint16_t to_float16(float x) {
    const uint32_t sign = bits_of(x) & 0x80000000, rest = bits_of(x) ^ sign;
    const uint32_t small = bits_of(float_of(rest) + 0.5f) - bits_of(0.5f);
    const uint32_t normal = (rest - (112u << 23) + 0xFFF + ((rest >> 13) & 1)) >> 13;
    const uint32_t payload = (rest & 0x7FFFFF) >> 13;
    const uint32_t nan = 0x7C00 + (payload ? payload : 1);
    const uint32_t special = rest > 0x7F800000 ? nan : 0x7C00;
    const uint32_t finite = rest < (113u << 23) ? small : normal;
    return (uint16_t)((rest >= (143u << 23) ? special : finite) | (sign >> 16));
}

// ---- kernels ------------------------------------------------------------------------------------

typedef void (*kernel)(void *out, void *const *operands, int count, Py_ssize_t length, double size);

// T: in memory. A: as an accumulator. END: what is done with the last one, `n` being the number of
// ranks as an A. `out` may be one of the operands, because a block is read before it is written.
// Each operand has a loop of its own: compilers that join two of them do not use wide registers.
#define KERNEL(NAME, T, A, LOAD, EXPR, END, STORE)                                                 \
    CLONES SEPARATE static void NAME##_next(A *restrict total, const T *restrict next,             \
                                            Py_ssize_t stop) {                                     \
        for (Py_ssize_t i = 0; i < stop; i++) {                                                    \
            const A x = total[i], y = LOAD(next[i]);                                               \
            total[i] = (A)(EXPR);                                                                  \
        }                                                                                          \
    }                                                                                              \
    CLONES static void NAME(void *out, void *const *operands, int count, Py_ssize_t length,        \
                            double size) {                                                         \
        const A n = (A)size;                                                                       \
        (void)n;                                                                                   \
        for (Py_ssize_t start = 0; start < length; start += BLOCK) {                               \
            const Py_ssize_t stop = length - start < BLOCK ? length - start : BLOCK;               \
            A total[BLOCK];                                                                        \
            const T *first = (const T *)operands[0] + start;                                       \
            T *into = (T *)out + start;                                                            \
            for (Py_ssize_t i = 0; i < stop; i++) total[i] = LOAD(first[i]);                       \
            for (int k = 1; k < count; k++)                                                        \
                NAME##_next(total, (const T *)operands[k] + start, stop);                          \
            for (Py_ssize_t i = 0; i < stop; i++) {                                                \
                const A x = total[i];                                                              \
                into[i] = STORE(END);                                                              \
            }                                                                                      \
        }                                                                                          \
    }

// Which of two NaNs is kept is written out, because compilers swap the operands of + and *.
#define SUM (x + (x != x ? x : y))
#define PRODUCT (x * (x != x ? x : y))
#define MINIMUM ((x < y || x != x) ? x : y)
#define MAXIMUM ((x > y || x != x) ? x : y)

#define FLOATS(S, T, A, LOAD, STORE)                                                               \
    KERNEL(sum_##S, T, A, LOAD, SUM, x, STORE)                                                   \
    KERNEL(avg_##S, T, A, LOAD, SUM, x / n, STORE)                                               \
    KERNEL(product_##S, T, A, LOAD, PRODUCT, x, STORE)                                                \
    KERNEL(min_##S, T, A, LOAD, MINIMUM, x, STORE)                                                 \
    KERNEL(max_##S, T, A, LOAD, MAXIMUM, x, STORE)

FLOATS(bfloat16, uint16_t, float, from_bfloat16, to_bfloat16)
FLOATS(float16, uint16_t, float, from_float16, to_float16)
KERNEL(avg_float32, float, float, SAME, SUM, x / n, SAME)
KERNEL(avg_float64, double, double, SAME, SUM, x / n, SAME)

typedef struct {
    const char *op, *dtype;
    int itemsize;
    kernel run;
} Entry;

#define ENTRIES(S)                                                                                 \
    {"SUM", #S, 2, sum_##S}, {"AVG", #S, 2, avg_##S}, {"PRODUCT", #S, 2, product_##S},             \
        {"MIN", #S, 2, min_##S}, {"MAX", #S, 2, max_##S}

static const Entry entries[] = {
    ENTRIES(bfloat16),
    ENTRIES(float16),
    {"AVG", "float32", 4, avg_float32},
    {"AVG", "float64", 8, avg_float64},
};
#define COUNT ((Py_ssize_t)(sizeof entries / sizeof *entries))

// ---- what has changed ---------------------------------------------------------------------------

#define FAR 255  // a gap of this many elements without a change behind it: the gap goes on

typedef struct {
    Py_ssize_t count, steps;  // changes, and bytes of `gaps`. count < 0: there is no room for them
} Changes;

// Most blocks of so many bytes have not changed, so they are compared at once.
#define WORDS 8

// T: an element. `room`: for so many changes. Each of them takes a byte of `gaps`, and each FAR
// elements without one. Elements lie in words as on processors with the lowest byte first.
#define DIFFER(NAME, T)                                                                            \
    CLONES static Changes NAME(const char *old, const char *now, Py_ssize_t nbytes,                \
                               unsigned char *gaps, void *into, Py_ssize_t room) {                 \
        const int bits = 8 * sizeof(T);                                                            \
        T *values = into;                                                                          \
        Py_ssize_t count = 0, steps = 0, next = 0; /* next: behind the last change */              \
        for (Py_ssize_t start = 0; start < nbytes; start += 8 * WORDS) {                           \
            const Py_ssize_t left = nbytes - start;                                                \
            uint64_t a[WORDS] = {0}, b[WORDS] = {0};                                               \
            if (left >= 8 * WORDS) {                                                               \
                memcpy(a, old + start, 8 * WORDS);                                                 \
                memcpy(b, now + start, 8 * WORDS);                                                 \
            } else {                                                                               \
                memcpy(a, old + start, (size_t)left);                                              \
                memcpy(b, now + start, (size_t)left);                                              \
            }                                                                                      \
            uint64_t differs = 0;                                                                  \
            for (int k = 0; k < WORDS; k++) differs |= a[k] ^ b[k];                                \
            if (!differs) continue;                                                                \
            unsigned words = 0; /* a bit for each one that has changed: no branches to guess */    \
            for (int k = 0; k < WORDS; k++) words |= (unsigned)(a[k] != b[k]) << k;                \
            for (; words; words &= words - 1) {                                                    \
                const int k = __builtin_ctz(words);                                                \
                for (uint64_t rest = a[k] ^ b[k]; rest;) {                                         \
                    const int j = __builtin_ctzll(rest) / bits;                                    \
                    rest &= ~((uint64_t)(T)-1 << (j * bits));                                      \
                    if (count == room) return (Changes){-1, 0};                                    \
                    const Py_ssize_t at = (start + 8 * k) / (Py_ssize_t)sizeof(T) + j;             \
                    for (; at - next >= FAR; next += FAR) gaps[steps++] = FAR;                     \
                    gaps[steps++] = (unsigned char)(at - next);                                    \
                    next = at + 1;                                                                 \
                    const T step = (T)((b[k] >> (j * bits)) - (a[k] >> (j * bits)));               \
                    values[count++] = (T)((T)(step << 1) ^ (T)-(step >> (bits - 1)));              \
                }                                                                                  \
            }                                                                                      \
        }                                                                                          \
        return (Changes){count, steps};                                                            \
    }

DIFFER(differ_1, uint8_t)
DIFFER(differ_2, uint16_t)
DIFFER(differ_4, uint32_t)
DIFFER(differ_8, uint64_t)

// ---- for Python ---------------------------------------------------------------------------------

static PyObject *find(PyObject *self, PyObject *args) {
    const char *op, *dtype;
    if (!PyArg_ParseTuple(args, "ss:find", &op, &dtype)) return NULL;
    for (Py_ssize_t i = 0; i < COUNT; i++)
        if (!strcmp(entries[i].op, op) && !strcmp(entries[i].dtype, dtype)) return PyLong_FromSsize_t(i);
    Py_RETURN_NONE;
}

#define FEW 16  // operands that need no memory of the heap

static PyObject *reduce(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "reduce takes a kernel, operands, out and size");
        return NULL;
    }
    const Py_ssize_t which = PyLong_AsSsize_t(args[0]);
    const double size = PyFloat_AsDouble(args[3]);
    if (PyErr_Occurred()) return NULL;
    if (which < 0 || which >= COUNT) {
        PyErr_Format(PyExc_ValueError, "there is no kernel %zd", which);
        return NULL;
    }
    const Entry *entry = &entries[which];
    PyObject *sequence = PySequence_Fast(args[1], "operands is a sequence of arrays");
    if (!sequence) return NULL;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
    if (count < 1 || count > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "there are no operands");
        Py_DECREF(sequence);
        return NULL;
    }
    PyObject *result = NULL;
    Py_ssize_t held = 0;  // buffers that are to be released: first `out`, then the operands
    Py_buffer few[FEW + 1], *buffers = few;
    void *few_places[FEW], **places = few_places;
    if (count > FEW) {
        buffers = PyMem_New(Py_buffer, count + 1);
        places = PyMem_New(void *, count);
        if (!buffers || !places) {
            PyErr_NoMemory();
            goto end;
        }
    }
    if (PyObject_GetBuffer(args[2], &buffers[0], PyBUF_WRITABLE | PyBUF_ND) < 0) goto end;
    held = 1;
    const Py_ssize_t nbytes = buffers[0].len;
    if (buffers[0].itemsize != entry->itemsize) {
        PyErr_Format(PyExc_ValueError, "out has elements of %zd bytes, %s has %d",
                     buffers[0].itemsize, entry->dtype, entry->itemsize);
        goto end;
    }
    for (Py_ssize_t k = 0; k < count; k++) {
        Py_buffer *buffer = &buffers[k + 1];
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(sequence, k), buffer, PyBUF_ND) < 0) goto end;
        held++;
        if (buffer->itemsize != entry->itemsize || buffer->len != nbytes) {
            PyErr_Format(PyExc_ValueError, "operand %zd has %zd bytes, out has %zd", k, buffer->len,
                         nbytes);
            goto end;
        }
        places[k] = buffer->buf;
    }
    if (nbytes * count < ALONE) {
        entry->run(buffers[0].buf, places, (int)count, nbytes / entry->itemsize, size);
    } else {
        Py_BEGIN_ALLOW_THREADS
        entry->run(buffers[0].buf, places, (int)count, nbytes / entry->itemsize, size);
        Py_END_ALLOW_THREADS
    }
    result = Py_NewRef(Py_None);
end:
    while (held) PyBuffer_Release(&buffers[--held]);
    if (buffers != few) PyMem_Free(buffers);
    if (places != few_places) PyMem_Free(places);
    Py_DECREF(sequence);
    return result;
}

static PyObject *differ(PyObject *self, PyObject *args) {
    Py_buffer old, now, gaps, values;
    if (!PyArg_ParseTuple(args, "y*y*w*w*:differ", &old, &now, &gaps, &values)) return NULL;
    PyObject *result = NULL;
    const Py_ssize_t width = values.itemsize;
    if (width != 1 && width != 2 && width != 4 && width != 8)
        PyErr_Format(PyExc_ValueError, "there are no elements of %zd bytes", width);
    else if (old.len != now.len || old.len % width)
        PyErr_Format(PyExc_ValueError, "%zd and %zd bytes of elements of %zd", old.len, now.len, width);
    else if (gaps.len < values.len / width + old.len / width / FAR)
        PyErr_Format(PyExc_ValueError, "%zd bytes are not enough for gaps", gaps.len);
    else {
        const Py_ssize_t room = values.len / width;
        Changes found;
        Py_BEGIN_ALLOW_THREADS
        found = (width == 1   ? differ_1
                 : width == 2 ? differ_2
                 : width == 4 ? differ_4
                              : differ_8)(old.buf, now.buf, old.len, gaps.buf, values.buf, room);
        Py_END_ALLOW_THREADS
        if (found.count < 0)
            result = Py_NewRef(Py_None);
        else
            result = Py_BuildValue("nn", found.count, found.steps);
    }
    PyBuffer_Release(&old);
    PyBuffer_Release(&now);
    PyBuffer_Release(&gaps);
    PyBuffer_Release(&values);
    return result;
}

static PyMethodDef methods[] = {
    {"differ", differ, METH_VARARGS,
     "differ(old, new, gaps, values)\n--\n\nWrite the gaps and values of what has changed, and return how"
     " many there are of both; None if there is no room."},
    {"find", find, METH_VARARGS,
     "find(op, dtype)\n--\n\nReturn the number of a kernel, or None if there is none."},
    {"reduce", (PyCFunction)(void (*)(void))reduce, METH_FASTCALL,
     "reduce(kernel, operands, out, size)\n--\n\nReduce contiguous arrays of `size` ranks into `out`."},
    {0},
};

static int begin(PyObject *module) { return PyModule_AddIntConstant(module, "LAYOUT", LAYOUT); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, begin},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},  // it keeps no state
#endif
    {0},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "aiodist._core", .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&module); }
