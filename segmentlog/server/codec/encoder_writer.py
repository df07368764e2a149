"""Write encoders: straight lines for one version of a message. Adjacent fields of fixed size are packed by one call."""

from __future__ import annotations

from dataclasses import replace

from segmentlog.server.codec.layouts import FORMATS, FieldLayout, MessageLayout, StructLayout
from segmentlog.server.codec.source_lines import SourceLines, one_of, struct_name


def write_encoder(message: MessageLayout, version: int) -> tuple[list[str], list[str]]:
    """Return the source lines of the body of an encoder, and of the functions that it calls.

    The encoder has the argument ``message``, and returns buffers.
    """
    writer = _EncoderWriter(message, version)
    return writer.write(), writer.helpers


def has_records(struct: StructLayout) -> bool:
    """Return whether the struct, or a struct in it, has a field of records."""
    return any(
        field.kind == "records" or (field.struct is not None and has_records(field.struct)) for field in struct.fields
    )


class _EncoderWriter(SourceLines):
    def __init__(self, message: MessageLayout, version: int) -> None:
        super().__init__()
        self._message = message
        self._version = version
        self._flexible = version in message.flexible
        self._pending: list[tuple[str, str]] = []
        # (format, expression) of fields of fixed size, packed by one call before the next line is emitted.
        self.helpers: list[str] = []

    def write(self) -> list[str]:
        with_records = has_records(self._message.struct)
        if with_records:
            self.emit("out = []")
        self._start_parts()
        self._struct(self._message.struct, "message")
        self._flush()
        if with_records:
            with self.block("if parts:"):
                self.emit('out.append(b"".join(parts))')
            self.emit("return out")
        else:
            self.emit('return [b"".join(parts)]')
        return self._shortened()

    def _start_parts(self) -> None:
        self.emit("parts = []")
        self.emit("add = parts.append")

    def _shortened(self) -> list[str]:
        if any("add(" in line for line in self.lines):
            return self.lines
        return [line for line in self.lines if line != "    add = parts.append"]

    def _helper(self, struct: StructLayout, field: FieldLayout) -> str:
        """Write a function that encodes the bytes of a tagged field; return its name."""
        nested = _EncoderWriter(self._message, self._version)
        nested._start_parts()
        nested._field(replace(field, tagged=range(0)), "value")
        nested._flush()
        nested.emit('return b"".join(parts)')
        if nested.helpers:
            raise NotImplementedError("a tagged field inside a tagged field is not supported")
        name = f"_encode_{struct.name}_{field.name}_{self._version}"
        self.helpers += [f"def {name}(value):", *nested._shortened(), ""]
        return name

    def _flush(self, uvarint: str | None = None) -> None:
        """Pack the pending fields, and after them the variable ``uvarint``, whose value usually takes one byte."""
        pending, self._pending = self._pending, []
        formats = [one for one, _ in pending]
        arguments = ", ".join(expression for one, expression in pending if one != "x")
        if set(formats) == {"x"}:
            packed = 'b"' + "\\0" * len(formats) + '"'
        else:
            packed = f"{struct_name('pack', formats)}({arguments})"
        if uvarint is None:
            if formats:
                self.emit(f"add({packed})")
        elif not formats:
            self.emit(f"add(UVARINTS[{uvarint}] if {uvarint} < SHORT else uvarint({uvarint}))")
        else:
            short = f"{arguments}, {uvarint}" if arguments else uvarint
            self.emit(
                f"add({struct_name('pack', [*formats, 'B'])}({short}) "
                f"if {uvarint} < SHORT else {packed} + uvarint({uvarint}))"
            )

    def _struct(self, struct: StructLayout, holder: str) -> None:
        for field in struct.fields:
            if self._version not in field.versions and not field.ignorable:
                with self.block(f"if {field.differs(f'{holder}.{field.name}')}:"):
                    self.emit(f'raise not_in_version("{struct.name}.{field.name}")')
        for field in struct.fields:
            if self._version in field.versions and self._version not in field.tagged:
                self._field(field, f"{holder}.{field.name}")
        if self._flexible:
            self._tags(struct, holder)

    def _tags(self, struct: StructLayout, holder: str) -> None:
        known = [field for field in struct.fields if self._version in field.tagged]
        if not known:
            self._pending.append(("x", ""))
            return
        self._flush()
        is_default = " and ".join(field.is_default(f"{holder}.{field.name}") for field in known)
        with self.block(f"if {is_default}:"):
            self.emit('add(b"\\0")')
        with self.block("else:"):
            tagged = self.name("tagged")
            self.emit(f"{tagged} = []")
            for field in sorted(known, key=lambda field: field.tag):
                value = f"{holder}.{field.name}"
                differs = field.differs(value)
                if field.stands_for_default and field.struct is not None:
                    differs += f" and {value} != {field.struct.name}()"
                with self.block(f"if {differs}:"):
                    self.emit(f"{tagged}.append(({field.tag}, {self._helper(struct, field)}({value})))")
            self.emit(f"add(tagged_fields({tagged}))")

    def _field(self, field: FieldLayout, value: str) -> None:
        nullable = self._version in field.nullable
        may_be_none = bool(field.nullable) and value != "value"
        if may_be_none and not nullable and (field.is_array or field.kind in ("string", "bytes")):
            with self.block(f"if {value} is None:"):
                self.emit(f'raise null_value("{field.name}")')
        nullable = nullable and value != "value"
        if field.is_array:
            self._array(field, value, nullable)
        elif field.struct is not None:
            self._inner_struct(field, field.struct, value, nullable)
        elif field.kind == "records":
            self._records(field, value)
        elif field.kind in ("string", "bytes"):
            self._sized(field, value, nullable)
        else:
            self._pending.append((FORMATS[field.kind], value))

    def _inner_struct(self, field: FieldLayout, struct: StructLayout, value: str, nullable: bool) -> None:
        if not nullable:
            self._struct(struct, value)
            return
        self._flush()
        with self.block(f"if {value} is None:"):
            self.emit('add(b"\\xff")')
        with self.block("else:"):
            self._pending.append(("b", "1"))
            self._struct(struct, value)
            self._flush()

    def _size(self, expression: str, is_null: str | None, wide: str, wish: str) -> None:
        """Write a size or a count, and pack it together with the pending fields."""
        if self._flexible:
            size = self.name(wish)
            self.emit(f"{size} = {f'0 if {is_null} else ' if is_null else ''}{expression} + 1")
            self._flush(size)
        else:
            self._pending.append((wide, f"-1 if {is_null} else {expression}" if is_null else expression))
            self._flush()

    def _sized(self, field: FieldLayout, value: str, nullable: bool) -> None:
        wide = "i" if field.kind == "bytes" else "h"
        encoded = value
        empty = f'b"" if {value} is None else ' if nullable else ""
        if field.kind == "string" or nullable:
            encoded = self.name(field.name)
            self.emit(f"{encoded} = {empty}{value}{'.encode()' if field.kind == 'string' else ''}")
        self._size(f"len({encoded})", f"{value} is None" if nullable else None, wide, f"{field.name}_size")
        self.emit(f"add({encoded})")

    def _records(self, field: FieldLayout, value: str) -> None:
        records = self.name(field.name)
        self.emit(f"{records} = {value}")
        size = self.name(f"{field.name}_size")
        null = 0 if self._flexible else -1
        more = " + 1" if self._flexible else ""
        with self.block(f"if {records} is None:"):
            self.emit(f"{size} = {null}")
        with self.block(f"elif isinstance({records}, BUFFER_TYPES):"):
            self.emit(f"{size} = len({records}){more}")
        with self.block("else:"):
            self.emit(f"{size} = sum(map(len, {records})){more}")
        if self._flexible:
            self._flush(size)
        else:
            self._pending.append(("i", size))
            self._flush()
        with self.block(f"if {records}:"):
            self.emit('out.append(b"".join(parts))')
            self.emit("parts.clear()")
            with self.block(f"if isinstance({records}, BUFFER_TYPES):"):
                self.emit(f"out.append({records})")
            with self.block("else:"):
                self.emit(f"out += {records}")

    def _array(self, field: FieldLayout, value: str, nullable: bool) -> None:
        is_null = f"{value} is None" if nullable else None
        self._size(f"len({value})", is_null, "i", f"{field.name}_count")
        if field.struct is None and field.kind in FORMATS:
            with self.block(f"if {value}:"):
                self.emit(f'add(pack(f">{{len({value})}}{FORMATS[field.kind]}", *{value}))')
            return
        element = self.name(one_of(field.name))
        before = len(self.lines)
        self.depth += 1
        if field.struct is not None:
            self._struct(field.struct, element)
        else:
            self._field(replace(field, is_array=False, nullable=range(0)), element)
        self._flush()
        self.depth -= 1
        inner = self.lines[before:]
        del self.lines[before:]
        elements = f"{value} or ()" if nullable else value
        if len(inner) == 1 and inner[0].lstrip().startswith("add("):
            packed = inner[0].strip().removeprefix("add(").removesuffix(")")
            # A comprehension costs a call, even over an empty list.
            with self.block(f"if {value}:"):
                self.emit(f"parts += [{packed} for {element} in {value}]")
            return
        self.emit(f"for {element} in {elements}:")
        self.lines += inner
