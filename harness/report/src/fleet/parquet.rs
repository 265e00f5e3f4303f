//! The rows as a Parquet file, for questions in SQL.

use std::sync::Arc;

use harness_explain::fleet::Row;
use parquet::basic::Compression;
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, DataType, Int64Type};
use parquet::errors::Result;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;

/// The version of the columns, which the file has under this key of its metadata. A column that is
/// removed or renamed, or that gets another meaning or unit, raises it. A new column does not.
pub const VERSION: (&str, u32) = ("harness_fleet_version", 1);

/// Rows per group, which a reader holds in memory.
const GROUP: usize = 65_536;

/// One column per field of [`Row`].
enum Column {
    Text(fn(&Row) -> Option<&str>),
    Number(fn(&Row) -> Option<u64>),
    Flag(fn(&Row) -> Option<bool>),
    Texts(fn(&Row) -> &[String]),
}

const COLUMNS: [(&str, Column); 23] = [
    ("file", Column::Text(|row| Some(&row.file))),
    ("job", Column::Text(|row| Some(&row.job))),
    ("rank", Column::Number(|row| row.rank.map(u64::from))),
    ("hash", Column::Text(|row| Some(&row.hash))),
    (
        "outcome",
        Column::Text(|row| Some(row.analysis.outcome.name())),
    ),
    (
        "problem",
        Column::Text(|row| row.analysis.problem.as_deref()),
    ),
    (
        "device",
        Column::Number(|row| Some(row.analysis.device.into())),
    ),
    ("events", Column::Number(|row| Some(row.analysis.events))),
    ("cause", Column::Text(|row| row.analysis.cause.as_deref())),
    (
        "cause_bytes",
        Column::Number(|row| Some(row.analysis.cause_bytes)),
    ),
    (
        "requested",
        Column::Number(|row| Some(row.analysis.requested)),
    ),
    (
        "allocated",
        Column::Number(|row| Some(row.analysis.allocated)),
    ),
    (
        "reserved",
        Column::Number(|row| Some(row.analysis.reserved)),
    ),
    (
        "peak_allocated",
        Column::Number(|row| (row.analysis.events > 0).then_some(row.analysis.peak_allocated)),
    ),
    (
        "peak_reserved",
        Column::Number(|row| (row.analysis.events > 0).then_some(row.analysis.peak_reserved)),
    ),
    (
        "device_total",
        Column::Number(|row| Some(row.analysis.device_total)),
    ),
    ("site", Column::Text(|row| row.analysis.site.as_deref())),
    (
        "top_site",
        Column::Text(|row| row.analysis.top_site.as_deref()),
    ),
    (
        "top_site_bytes",
        Column::Number(|row| Some(row.analysis.top_site_bytes)),
    ),
    (
        "category",
        Column::Text(|row| row.analysis.category.as_deref()),
    ),
    (
        "category_bytes",
        Column::Number(|row| Some(row.analysis.category_bytes)),
    ),
    ("faithful", Column::Flag(|row| row.analysis.faithful)),
    ("cures", Column::Texts(|row| &row.analysis.cures)),
];

pub fn file(rows: &[Row]) -> Result<Vec<u8>> {
    let field = |(name, column): &(&str, Column)| match column {
        Column::Text(_) => format!("optional binary {name} (UTF8);"),
        Column::Number(_) => format!("optional int64 {name};"),
        Column::Flag(_) => format!("optional boolean {name};"),
        // All readers know this form of a list; some fail at a plain repeated column.
        Column::Texts(_) => format!(
            "required group {name} (LIST) {{ repeated group list {{ required binary element \
             (UTF8); }} }}"
        ),
    };
    let schema = parse_message_type(&format!(
        "message fleet {{ {} }}",
        COLUMNS.iter().map(field).collect::<String>()
    ))?;
    let properties = WriterProperties::builder()
        .set_compression(Compression::GZIP(Default::default()))
        .set_key_value_metadata(Some(vec![KeyValue::new(
            VERSION.0.to_owned(),
            VERSION.1.to_string(),
        )]))
        .build();
    let mut writer = SerializedFileWriter::new(Vec::new(), Arc::new(schema), Arc::new(properties))?;
    for rows in rows.chunks(GROUP) {
        let mut group = writer.next_row_group()?;
        for (_, column) in &COLUMNS {
            match *column {
                Column::Text(of) => optional::<ByteArrayType>(
                    &mut group,
                    rows.iter().map(|row| of(row).map(ByteArray::from)),
                )?,
                Column::Number(of) => optional::<Int64Type>(
                    &mut group,
                    rows.iter().map(|row| of(row).map(u64::cast_signed)),
                )?,
                Column::Flag(of) => optional::<BoolType>(&mut group, rows.iter().map(of))?,
                Column::Texts(of) => repeated(&mut group, rows.iter().map(of))?,
            }
        }
        group.close()?;
    }
    writer.into_inner()
}

type Group<'a> = SerializedRowGroupWriter<'a, Vec<u8>>;

fn optional<T: DataType>(
    group: &mut Group<'_>,
    values: impl Iterator<Item = Option<T::T>>,
) -> Result<()> {
    let (mut found, mut levels) = (Vec::new(), Vec::new());
    for value in values {
        levels.push(i16::from(value.is_some()));
        found.extend(value);
    }
    write::<T>(group, &found, &levels, None)
}

fn repeated<'r>(group: &mut Group<'_>, lists: impl Iterator<Item = &'r [String]>) -> Result<()> {
    let (mut found, mut levels, mut repetitions) = (Vec::new(), Vec::new(), Vec::new());
    for texts in lists {
        if texts.is_empty() {
            levels.push(0);
            repetitions.push(0);
        }
        for (index, text) in texts.iter().enumerate() {
            levels.push(1);
            repetitions.push(i16::from(index > 0));
            found.push(ByteArray::from(text.as_str()));
        }
    }
    write::<ByteArrayType>(group, &found, &levels, Some(&repetitions))
}

fn write<T: DataType>(
    group: &mut Group<'_>,
    values: &[T::T],
    levels: &[i16],
    repetitions: Option<&[i16]>,
) -> Result<()> {
    if let Some(mut column) = group.next_column()? {
        column
            .typed::<T>()
            .write_batch(values, Some(levels), repetitions)?;
        column.close()?;
    }
    Ok(())
}
