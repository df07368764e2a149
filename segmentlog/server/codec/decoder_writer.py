"""Write decoders: straight lines for one version of a message. Adjacent fields of fixed size are read by one call.

An element that takes one byte in a request may take a hundred in memory. So all arrays of a request together may have
`ELEMENTS_MAX` elements. For an array of a response (`ARRAY_MAX`), and for the tagged fields of a struct (`TAGS_MAX`),
the limits are Kafka's. A decoder checks a count before it allocates, and lists grow with their elements.
"""

from __future__ import annotations

from dataclasses import replace

from segmentlog.server.codec.layouts import (
    FORMATS,
    SIZES,
    FieldLayout,
    MessageLayout,
    StructLayout,
    least_size,
    least_struct_size,
)
from segmentlog.server.codec.source_lines import SourceLines, one_of, struct_name


def write_decoder(message: MessageLayout, version: int) -> list[str]:
    """Return the source lines of the body of a decoder.

    The decoder has the arguments ``data`` and ``at``, and returns the message that begins at position ``at``.
    """
    return _DecoderWriter(message, version).write(message.struct)


class _DecoderWriter(SourceLines):
    def __init__(self, message: MessageLayout, version: int) -> None:
        super().__init__()
        self._version = version
        self._flexible = version in message.flexible
        self._room = "ARRAY_MAX" if message.kind == "response" else "room"
        self._pending: list[tuple[str, str]] = []
        # (format, variable) of fields of fixed size, read by one call before the next line is emitted.

    def write(self, struct: StructLayout) -> list[str]:
        variable = self.name("decoded")
        expression = self._struct(struct)
        self._flush()
        self.emit(f"{variable} = {expression}")
        with self.block("if at > limit:"):
            self.emit("raise truncated()")
        self.emit(f"return {variable}")
        if any("room -= " in line for line in self.lines):
            self.lines.insert(0, "    room = ELEMENTS_MAX")
        if any("limit" in line for line in self.lines):
            self.lines.insert(0, "    limit = len(data)")
        return self.lines

    def _fixed(self, letter: str, wish: str) -> str:
        variable = self.name(wish)
        self._pending.append((letter, variable))
        return variable

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if not pending:
            return
        formats = [one for one, _ in pending]
        if formats == ["B"]:
            self.emit(f"{pending[0][1]} = data[at]")
        else:
            variables = ", ".join(variable for _, variable in pending)
            variables = variables if len(pending) > 1 else f"({variables},)"
            self.emit(f"{variables} = {struct_name('unpack', formats)}(data, at)")
        self.emit(f"at += {sum(SIZES[one] for one in formats)}")

    def _struct(self, struct: StructLayout) -> str:
        """Return the expression that creates the struct. The caller must flush the pending fields before it."""
        variables = {}
        for field in struct.fields:
            if self._version in field.versions and self._version not in field.tagged:
                variables[field.name] = self._field(field)
        if self._flexible:
            variables |= self._tags(struct)
        return f"{struct.name}({', '.join(f'{name}={variable}' for name, variable in variables.items())})"

    def _tags(self, struct: StructLayout) -> dict[str, str]:
        known = [field for field in struct.fields if self._version in field.tagged]
        count = self._fixed("B", "tag_count")
        self._flush()
        variables = {field.name: self.name(field.name) for field in known}
        if not known:
            with self.block(f"if {count}:"):
                self.emit(f"at = skip_tags(data, at, {count})")
            return variables
        for field in known:
            self.emit(f"{variables[field.name]} = {field.default}")
        with self.block(f"if {count}:"):
            with self.block(f"if {count} >= SHORT:"):
                self.emit(f"{count}, at = long_tag_count(data, at, {count})")
            with self.block(f"for _ in range({count}):"):
                self.emit("tag, at, end = next_tag(data, at)")
                for number, field in enumerate(known):
                    with self.block(f"{'el' if number else ''}if tag == {field.tag}:"):
                        expression = self._field(field)
                        self._flush()
                        self.emit(f"{variables[field.name]} = {expression}")
                        with self.block("if at != end:"):
                            self.emit(f'raise wrong_size("{struct.name}.{field.name}")')
                self.emit("at = end")
        return variables

    def _field(self, field: FieldLayout) -> str:
        nullable = self._version in field.nullable
        if field.is_array:
            return self._array(field, nullable)
        if field.struct is not None:
            return self._nullable_struct(field, field.struct) if nullable else self._struct(field.struct)
        if field.kind == "records":
            return self._records(field, nullable)
        if field.kind in ("string", "bytes"):
            return self._sized(field, nullable)
        return self._fixed(FORMATS[field.kind], field.name)

    def _nullable_struct(self, field: FieldLayout, struct: StructLayout) -> str:
        mark = self._fixed("b", f"{field.name}_mark")
        self._flush()
        variable = self.name(field.name)
        self.emit(f"{variable} = None")
        with self.block(f"if {mark} >= 0:"):
            expression = self._struct(struct)
            self._flush()
            self.emit(f"{variable} = {expression}")
        return variable

    def _sized(self, field: FieldLayout, nullable: bool) -> str:
        """Read a string or bytes; return the variable."""
        wide = field.kind == "bytes"
        size = self._fixed("B" if self._flexible else "i" if wide else "h", f"{field.name}_size")
        self._flush()
        variable = self.name(field.name)
        decode = "" if wide else ".decode()"
        if self._flexible:
            with self.block(f"if 0 < {size} < SHORT:"):
                self.emit(f"{variable} = TAKE_COMPACT[{size}](data, at)[0]{decode}")
                self.emit(f"at += {size} - 1")
        else:
            with self.block(f"if 0 <= {size} < SHORT:"):
                self.emit(f"{variable} = TAKE[{size}](data, at)[0]{decode}")
                self.emit(f"at += {size}")
        with self.block("else:"):
            helper = f"long{'_compact' * self._flexible}{'_nullable' * nullable}_{field.kind}"
            self.emit(f"{variable}, at = {helper}(data, at, {size})")
        return variable

    def _count(self, wish: str, wide: str) -> str:
        """Read a size or a count, -1 for null; return the variable."""
        count = self._fixed("B" if self._flexible else wide, wish)
        self._flush()
        if self._flexible:
            with self.block(f"if {count} >= SHORT:"):
                self.emit(f"{count}, at = long_uvarint(data, at, {count})")
            self.emit(f"{count} -= 1")
        return count

    def _records(self, field: FieldLayout, nullable: bool) -> str:
        size = self._count(f"{field.name}_size", "i")
        variable = self.name(field.name)
        if nullable:
            self.emit(f"{variable} = None")
            with self.block(f"if {size} >= 0:"):
                self.emit(f"{variable} = data[at : at + {size}]")
                self.emit(f"at += {size}")
        else:
            with self.block(f"if {size} < 0:"):
                self.emit(f'raise wrong_count("{field.name}", {size})')
            self.emit(f"{variable} = data[at : at + {size}]")
            self.emit(f"at += {size}")
        return variable

    def _array(self, field: FieldLayout, nullable: bool) -> str:
        count = self._count(f"{field.name}_count", "i")
        if field.struct is not None:
            least = least_struct_size(field.struct, self._version, self._flexible)
        else:
            scalar = replace(field, is_array=False)
            least = least_size(scalar, self._version, self._flexible)
        variable = self.name(field.name)
        needed = count if least == 1 else f"{count} * {least}"
        excess = f"{needed} > limit - at or {count} > {self._room}"
        if not nullable:
            with self.block(f"if {count} < 0 or {excess}:"):
                self.emit(f'raise wrong_count("{field.name}", {count})')
            self._elements(field, variable, count, least)
            return variable
        with self.block(f"if {excess}:"):
            self.emit(f'raise wrong_count("{field.name}", {count})')
        self.emit(f"{variable} = None")
        with self.block(f"if {count} >= 0:"):
            self._elements(field, variable, count, least)
        return variable

    def _elements(self, field: FieldLayout, variable: str, count: str, least: int) -> None:
        if self._room == "room":
            self.emit(f"room -= {count}")
        if field.struct is None and field.kind in FORMATS:
            one = FORMATS[field.kind]
            self.emit(f'{variable} = list(unpack_from(f">{{{count}}}{one}", data, at))')
            self.emit(f"at += {count} * {SIZES[one]}" if SIZES[one] > 1 else f"at += {count}")
            return
        before = len(self.lines)
        self.depth += 1
        if field.struct is not None:
            expression = self._struct(field.struct)
        else:
            expression = self._field(replace(field, is_array=False, name=one_of(field.name)))
        if field.struct is not None and len(self.lines) == before and self._pending:
            # Every field of the element has a fixed size: read all elements in one pass in C, without updating the
            # position for each.
            pending, self._pending = self._pending, []
            self.depth -= 1
            variables = ", ".join(variable for _, variable in pending)
            variables = variables if len(pending) > 1 else f"({variables},)"
            iterate = struct_name("iter", [one for one, _ in pending])
            end = self.name(f"{variable}_end")
            self.emit(f"{end} = at + {count} * {least}")
            self.emit(f"{variable} = [{expression} for {variables} in {iterate}(data[at:{end}])]")
            self.emit(f"at = {end}")
            return
        self._flush()
        inner = self.lines[before:]
        del self.lines[before:]
        self.depth -= 1
        self.emit(f"{variable} = []")
        self.emit(f"for _ in range({count}):")
        self.lines += inner
        self.emit(f"    {variable}.append({expression})")
