# The C types of records.py, which Cython reads beside it. Nothing in this file changes what that module does.
cimport cython

cdef Py_ssize_t _START, _BODY, _TIMESTAMP_DELTA, _AFTER_TIMESTAMP, _OFFSET_DELTA, _KEY, _KEY_SIZE, _VALUE, _VALUE_SIZE
cdef Py_ssize_t _HEADER_COUNT, _HEADERS, _END
cdef Py_ssize_t _TURN_MASK, _HEADERS_MAX, _INT_MAX_SIZE, _BODY_MAX, _NUMBERS_MAX
cdef int _BIN, _STR, _ARRAY

@cython.locals(
    raw=cython.p_uchar, at=cython.Py_ssize_t[1], position=cython.Py_ssize_t, previous=cython.longlong,
    least=cython.longlong, largest=cython.longlong, null_keys=cython.longlong, null_values=cython.longlong,
    with_headers=cython.longlong, all_headers=cython.longlong, index=cython.Py_ssize_t, length=cython.longlong, body=cython.Py_ssize_t,
    end=cython.Py_ssize_t, timestamp=cython.longlong, after_timestamp=cython.Py_ssize_t, offset=cython.longlong,
    key_size=cython.longlong, key=cython.Py_ssize_t, value_size=cython.longlong, value=cython.Py_ssize_t,
    header_count=cython.longlong, headers=cython.Py_ssize_t, part_size=cython.longlong, part=cython.Py_ssize_t,
)
cpdef tuple scan_records(
    bytes data, Py_ssize_t size, Py_ssize_t count, long long last_offset_delta, long long[:, ::1] table
)

@cython.locals(
    raw=cython.p_uchar, size=cython.Py_ssize_t, index=cython.Py_ssize_t, start=cython.longlong, length=cython.longlong,
)
cpdef list cut_field(bytes data, const long long[:, ::1] table, Py_ssize_t start_row, Py_ssize_t first, Py_ssize_t stop)

@cython.locals(
    raw=cython.p_uchar, at=cython.Py_ssize_t[1], size=cython.Py_ssize_t, index=cython.Py_ssize_t, count=cython.longlong,
    start=cython.Py_ssize_t, length=cython.longlong,
)
cpdef list cut_headers(bytes data, const long long[:, ::1] table, Py_ssize_t first, Py_ssize_t stop)

@cython.locals(
    keys_end=cython.Py_ssize_t, values_end=cython.Py_ssize_t, headers_end=cython.Py_ssize_t, raw_keys=cython.p_uchar,
    raw_values=cython.p_uchar, raw_headers=cython.p_uchar, key_at=cython.Py_ssize_t[1], value_at=cython.Py_ssize_t[1],
    header_at=cython.Py_ssize_t[1], capacity=cython.Py_ssize_t, out=bytearray, raw=cython.p_uchar,
    position=cython.Py_ssize_t, index=cython.Py_ssize_t, key_size=cython.longlong, value_size=cython.longlong,
    tail_size=cython.longlong, timestamp=cython.longlong, offset=cython.longlong, body=cython.longlong,
)
cpdef bytearray encode_columns(
    bytes keys, bytes values, bytes headers, Py_ssize_t count, const long long[::1] timestamp_deltas,
    const long long[::1] offset_deltas
)

@cython.locals(size=cython.Py_ssize_t, rest=cython.ulonglong)
cdef Py_ssize_t _varint_size(long long number) noexcept
@cython.locals(rest=cython.ulonglong, byte=cython.ulonglong)
cdef Py_ssize_t _write_varint(unsigned char* raw, Py_ssize_t position, long long number) noexcept
@cython.locals(start=cython.Py_ssize_t, index=cython.longlong)
cdef Py_ssize_t _write_item(
    unsigned char* raw, Py_ssize_t position, unsigned char* source, Py_ssize_t* at, long long size
) noexcept
@cython.locals(at=cython.Py_ssize_t[1], count=cython.longlong, size=cython.longlong, part_size=cython.longlong)
cdef long long _size_of_headers(unsigned char* source, Py_ssize_t start, Py_ssize_t end) noexcept
@cython.locals(count=cython.longlong, part_size=cython.longlong)
cdef Py_ssize_t _write_headers(
    unsigned char* raw, Py_ssize_t position, unsigned char* source, Py_ssize_t* at, Py_ssize_t end
) noexcept
@cython.locals(size=cython.longlong)
cdef long long _read_item(unsigned char* raw, Py_ssize_t* at, Py_ssize_t end, int kind) noexcept
@cython.locals(
    position=cython.Py_ssize_t, mark=cython.uchar, width=cython.int, size=cython.longlong, index=cython.int
)
cdef long long _read_size(unsigned char* raw, Py_ssize_t* at, Py_ssize_t end, int kind) noexcept

@cython.locals(begin=cython.Py_ssize_t, number=cython.longlong)
cdef long long _read_int(unsigned char* raw, Py_ssize_t* at, Py_ssize_t end) noexcept
@cython.locals(
    position=cython.Py_ssize_t, number=cython.ulonglong, part=cython.ulonglong, shift=cython.int, byte=cython.uchar,
)
cdef long long _read_long(unsigned char* raw, Py_ssize_t* at, Py_ssize_t end) noexcept
